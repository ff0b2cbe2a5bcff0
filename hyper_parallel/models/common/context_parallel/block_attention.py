"""Attention of a block of queries to a block of keys, to be merged with that to other keys.

torch's own kernels either hide the log-sum-exp that merging needs, or hand it out on one kind of device; these are
plain products, and run on any. Only `TILE_QUERIES` rows of scores exist at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

TILE_QUERIES = 256


def attend_block(
    q_NQHD: torch.Tensor, k_NTKD: torch.Tensor, v_NTKD: torch.Tensor, *, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention to the keys of the block alone.

    Args:
        is_causal: as many queries as keys, each seeing the keys up to its own; else each sees all.

    Returns:
        out [N, Q, H, D] and the log of the sum of exponentials [N, Q, H], in float32 or wider.
    """
    outs, lses = [], []
    k_NKDT, v_NKTD = k_NTKD.permute(0, 2, 3, 1), v_NTKD.transpose(1, 2)
    for rows, keys in _tiles(q_NQHD.shape[1], k_NTKD.shape[1], is_causal):
        q_NKGQD = _by_kv_head(q_NQHD[:, rows], k_NTKD)
        scores = _scores(q_NKGQD, k_NKDT[..., keys], rows if is_causal else None)
        lse_NKGQ = scores.logsumexp(-1)
        weights = scores.sub_(lse_NKGQ[..., None]).exp_().to(v_NTKD.dtype)
        out = (weights.flatten(2, 3) @ v_NKTD[..., keys, :]).view(q_NKGQD.shape)
        outs.append(_by_token(out))
        lses.append(_by_token(lse_NKGQ[..., None])[..., 0])
    return torch.cat(outs, 1), torch.cat(lses, 1)


def attend_block_backward(
    grad_NQHD: torch.Tensor,
    q_NQHD: torch.Tensor,
    k_NTKD: torch.Tensor,
    v_NTKD: torch.Tensor,
    lse_NQH: torch.Tensor,
    along_NQH: torch.Tensor,
    *,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The block's share of the gradients of q, k and v (Dao et al. 2022, https://arxiv.org/abs/2205.14135, appendix B).

    Args:
        grad_NQHD: gradient of the attention to all keys.
        lse_NQH: log of the sum of exponentials over all keys, not the block's.
        along_NQH: sum over D of that gradient times the attention to all keys.
    """
    wide = lse_NQH.dtype
    grad_q = torch.empty_like(q_NQHD, dtype=wide)
    grad_k, grad_v = (torch.zeros_like(x.transpose(1, 2), dtype=wide) for x in (k_NTKD, v_NTKD))
    k_NKTD, v_NKTD = k_NTKD.transpose(1, 2), v_NTKD.transpose(1, 2)
    for rows, keys in _tiles(q_NQHD.shape[1], k_NTKD.shape[1], is_causal):
        q, grad, lse, along = (
            _by_kv_head(x[:, rows], k_NTKD) for x in (q_NQHD, grad_NQHD, lse_NQH[..., None], along_NQH[..., None])
        )
        k, v = k_NKTD[..., keys, :], v_NKTD[..., keys, :]
        weights = _scores(q, k.transpose(-1, -2), rows if is_causal else None).sub_(lse).exp_()
        grad_weights = (grad.flatten(2, 3) @ v.transpose(-1, -2)).view(weights.shape)
        grad_scores = (weights * (grad_weights - along)).mul_(q.shape[-1] ** -0.5).to(q.dtype).flatten(2, 3)
        grad_q[:, rows] = _by_token((grad_scores @ k).view(q.shape)).to(wide)
        grad_k[..., keys, :] += grad_scores.transpose(-1, -2) @ q.flatten(2, 3)
        grad_v[..., keys, :] += weights.to(grad.dtype).flatten(2, 3).transpose(-1, -2) @ grad.flatten(2, 3)
    return grad_q, grad_k.transpose(1, 2), grad_v.transpose(1, 2)


def _tiles(queries: int, keys: int, is_causal: bool) -> Iterator[tuple[slice, slice]]:
    """Runs of queries, and the keys that any of them sees."""
    for begin in range(0, queries, TILE_QUERIES):
        end = min(begin + TILE_QUERIES, queries)
        yield slice(begin, end), slice(0, end if is_causal else keys)


def _scores(q_NKGQD: torch.Tensor, k_NKDT: torch.Tensor, causal_rows: slice | None) -> torch.Tensor:
    """[N, K, G, Q, T] in float32 or wider; of queries number `causal_rows` only up to their own number."""
    scale = q_NKGQD.shape[-1] ** -0.5
    scores = ((q_NKGQD * scale).flatten(2, 3) @ k_NKDT).view(*q_NKGQD.shape[:4], -1)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if causal_rows is not None:
        shape = scores.shape[-2:]
        scores += scores.new_full(shape, -torch.inf).triu(1 + causal_rows.start)
    return scores


def _by_kv_head(x_NQHD: torch.Tensor, k_NTKD: torch.Tensor) -> torch.Tensor:
    """[N, K, G, Q, D]: heads by the key head that serves them."""
    return x_NQHD.unflatten(2, (k_NTKD.shape[2], -1)).permute(0, 2, 3, 1, 4)


def _by_token(x_NKGQD: torch.Tensor) -> torch.Tensor:
    """[N, Q, H, D]"""
    return x_NKGQD.permute(0, 3, 1, 2, 4).flatten(2, 3)
