"""From the fields of a document to token ids, and which of them are trained."""

from hyper_parallel.components.data.transforms.chat import ChatTransform
from hyper_parallel.components.data.transforms.plain_text import PlainTextTransform
from hyper_parallel.components.data.transforms.token_ids import TokenIdsTransform
from hyper_parallel.components.data.transforms.transform import Transform

__all__ = ["ChatTransform", "PlainTextTransform", "TokenIdsTransform", "Transform"]
