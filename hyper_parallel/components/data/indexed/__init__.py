"""Token ids on disk in Megatron's format: documents by number, and the samples that Megatron trains GPT on.

Two map-style datasets with random access, both without torch until a sample is asked for:

- `IndexedDataset(prefix)`: ``len``, ``dataset[d]`` the tokens of document d; the whole data as ``tokens`` [tokens] and
  ``document_offsets`` [documents + 1], which is what the packings work on; ``fingerprint``.
- `GPTDataset(prefix or blend, ...)`: ``len``, ``dataset[k]`` sample k of a fixed, shuffled order as a dict of tensors
  [seq_len] (``input_ids``, ``labels`` aligned with the logits, -100 where untrained, ``position_ids``, and with
  ``reset_attention_mask`` the bool ``segment_starts``); ``fingerprint`` of the data and of all that shapes the order.
  The position of a run is the number of samples consumed.

`IndexedWriter` writes such a pair. What is wrong with files or arguments is a ConfigError.
"""

from hyper_parallel.components.data.indexed.gpt_dataset import GPTDataset
from hyper_parallel.components.data.indexed.indexed_dataset import IndexedDataset
from hyper_parallel.components.data.indexed.indexed_writer import IndexedWriter

__all__ = ["GPTDataset", "IndexedDataset", "IndexedWriter"]
