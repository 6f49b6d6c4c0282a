"""Derived numbers of a layer as 0-d tensors. Nothing waits for a device, nothing uses a random stream, autocast is off."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from msprobe_integrations.torch.tensors.devices import widest
from msprobe_integrations.torch.tensors.stretches import stretch

PIECE = {"cpu": 1 << 20}
"""Elements of attention weights, and of what is cast for a feature, that are in memory at a time, by type of device."""
_PIECE = 1 << 22  # float32, of which an attention has four at a time
_MASKED = -1e30  # not -inf: its product with a weight of zero is zero
_GOLDEN = 0.6180339887498949
_STEADY = 3
_TOLERANCE = 1e-4
_SQUARINGS = 14
_TINY = 1e-30


def attention(q: torch.Tensor, k: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean over all rows, heads and batches of the entropy (nats) and of the largest weight of a causal attention.

    The existing tool takes batch 0 and head 0 only. Weights are ``softmax(q k^T / sqrt(d))`` with the causal mask; with more keys than
    queries the last query sees all keys. They are made in pieces of `PIECE` elements.

    Args:
        q: queries, 4-D, float.
        k: keys, 4-D; the number of heads divides that of `q` (grouped queries).
        layout: ``s,b,h,d`` or ``b,s,h,d``, of both.

    Returns:
        entropy and largest weight, `devices.widest` [].

    Raises:
        ValueError: the shapes do not fit.
    """
    if q.dim() != 4 or k.dim() != 4:
        raise ValueError(f"q and k have shapes {list(q.shape)} and {list(k.shape)}; allowed: four dimensions ({layout})")
    order = (1, 2, 0, 3) if layout == "s,b,h,d" else (0, 2, 1, 3)
    q, k = q.detach().permute(order), k.detach().permute(order)  # [batch, heads, length, d]
    (batches, heads, rows, d), (_, groups, keys, _) = q.shape, k.shape
    if k.shape[0] != batches or k.shape[3] != d or not groups or heads % groups:
        raise ValueError(f"q and k do not fit each other: {list(q.shape)} and {list(k.shape)} as batch, heads, length, d")
    share = heads // groups
    budget, longest = _budget(q), max(1, keys, d)
    per_time = max(1, min(heads, budget // max(1, rows * longest)))
    block = max(1, min(rows, budget // longest))
    dtype, wide = torch.float64 if q.dtype == torch.float64 else torch.float32, widest(q)
    entropy = torch.zeros((), dtype=wide, device=q.device)
    largest = torch.zeros_like(entropy)
    first_key = keys - rows
    for batch in range(batches):
        for h in range(0, heads, per_time):
            some = q[batch, h : h + per_time]
            group = torch.arange(h, h + some.shape[0], device=q.device) // share
            for i in range(0, rows, block):
                last = min(i + block, rows)
                seen = max(1, min(keys, last + first_key))  # the keys behind are masked for all rows of the block
                asked, each = some[:, i:last].to(dtype), max(1, budget // (some.shape[0] * d))
                parts = [
                    torch.matmul(asked, k[batch, :, start : min(start + each, seen)].index_select(0, group).to(dtype).transpose(1, 2))
                    for start in range(0, seen, each)
                ]
                weights = (parts[0] if len(parts) == 1 else torch.cat(parts, -1)).div_(d**0.5)
                del parts
                own_positions = torch.arange(i + first_key, last + first_key, device=q.device)[:, None]
                weights.masked_fill_(torch.arange(seen, device=q.device) > own_positions, _MASKED)
                weights.sub_(weights.amax(-1, keepdim=True))
                share_of = weights.exp()
                total = share_of.sum(-1)
                entropy += (total.log() - share_of.mul_(weights).sum(-1) / total).sum(dtype=wide)
                largest += total.reciprocal().sum(dtype=wide)  # exp(0) = 1 stands for the largest
    n = batches * heads * rows
    return entropy / n, largest / n


def start_vector(n: int, device: torch.device) -> torch.Tensor:
    """Where power iteration begins: [n] float32, of length 1, always the same, from no random stream."""
    places = torch.arange(1, n + 1, device=device) * int(_GOLDEN * 2**40) & (2**40 - 1)  # fractions, in a type that every device has
    spread = places.float() * 2.0**-40 - 0.4
    vector: torch.Tensor = spread / torch.linalg.vector_norm(spread)
    return vector


def spectral_norm(weight: torch.Tensor, start: torch.Tensor, iterations: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest singular value of a matrix; approaches it from below.

    An iteration is one of the power method: the matrix and its transpose times a vector. All vectors are kept, and the norm is the
    largest on the space they span (Lanczos): 30 iterations are exact to 1e-3 where the power method alone would be some per cent
    low. On the host it ends when three more iterations do not change the value any more. On a device that would be a wait, so there
    the number of iterations is fixed.

    Args:
        weight: [m, n] float.
        start: [n] float32, of length 1: `start_vector`, or what the last call returned.
        iterations: upper bound.

    Returns:
        the norm, `devices.widest` [], and where the next call may begin, [n] float32.
    """
    matrix = weight.detach()
    blocks = _blocks(matrix)
    most = min(iterations, matrix.shape[0] + 1, matrix.shape[1])  # where it begins need not lie in the space of the rows
    vectors = start.new_zeros(most, matrix.shape[1])
    images = start.new_zeros(most, matrix.shape[0])
    on_host = matrix.device.type == "cpu"
    values: list[float] = []
    v = start
    for i in range(most):
        vectors[i] = v
        for rows, block in blocks:
            images[i, rows] = torch.mv(block.float(), v)
        if on_host:
            values.append(_largest(images[: i + 1])[0].item())
            if len(values) > _STEADY and not values[-1] - values[-1 - _STEADY] > _TOLERANCE * values[-1]:
                most = i + 1
                break
        v = torch.mv(blocks[0][1].float().t(), images[i, blocks[0][0]])
        for rows, block in blocks[1:]:
            v += torch.mv(block.float().t(), images[i, rows])
        for _ in range(2):  # once leaves what rounding has left
            v = v - torch.mv(vectors[: i + 1].t(), torch.mv(vectors[: i + 1], v))
        v = v / torch.linalg.vector_norm(v).clamp_min(_TINY)
    square, shares = _largest(images[:most])
    best = torch.mv(vectors[:most].t(), shares.float())
    return square.clamp_min(0).sqrt(), best / torch.linalg.vector_norm(best).clamp_min(_TINY)


def _budget(like: torch.Tensor) -> int:
    return PIECE.get(like.device.type, _PIECE)


def _blocks(matrix: torch.Tensor) -> list[tuple[slice, torch.Tensor]]:
    """Rows of a matrix, as many as may be cast at a time; all where that is none or may stay in memory."""
    rows = max(1, _PIECE // max(1, matrix.shape[1]))
    if matrix.dtype == torch.float32 or matrix.shape[0] <= rows:
        return [(slice(None), matrix.float())]
    return [(slice(at, at + rows), matrix[at : at + rows]) for at in range(0, matrix.shape[0], rows)]


def _largest(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest eigenvalue and its vector of ``images @ images.T``, `devices.widest`, without a wait: by squaring again and again."""
    wide = images.to(widest(images))
    gram = wide @ wide.t()
    power = gram
    for _ in range(_SQUARINGS):
        power = power / power.diagonal().sum().clamp_min(_TINY)
        power = power @ power
    shares = power.index_select(1, power.diagonal().argmax().reshape(1))[:, 0]
    shares = shares / torch.linalg.vector_norm(shares).clamp_min(_TINY)
    return shares @ gram @ shares, shares


def similarity(weight: torch.Tensor) -> torch.Tensor:
    """Mean cosine similarity of all pairs of experts of a router.

    Args:
        weight: [experts, hidden] or [hidden, experts]: experts are the shorter side, the second one when they are equal.

    Returns:
        `devices.widest` []; 0 with fewer than two experts.
    """
    vectors, wide = weight.detach(), widest(weight)
    vectors = vectors if vectors.shape[0] < vectors.shape[1] else vectors.t()
    n, length = vectors.shape
    total, itself = torch.zeros(length, dtype=wide, device=weight.device), torch.zeros((), dtype=wide, device=weight.device)
    if n < 2:
        return itself
    each = max(1, _budget(weight) // max(1, length))
    for start in range(0, n, each):
        unit = vectors[start : start + each].to(wide)
        unit = unit / torch.linalg.vector_norm(unit, dim=1, keepdim=True).clamp_min(1e-12)
        total, itself = total + unit.sum(0), itself + unit.square().sum()
    # the sum over all pairs, without the matrix of them: |sum of all|^2 has every pair twice, and each with itself
    mean: torch.Tensor = (total.square().sum() - itself) / (n * (n - 1))
    return mean


def token_entropy(logits: torch.Tensor) -> torch.Tensor:
    """Mean over tokens of the entropy (nats) of ``softmax(logits)`` over experts; experts masked with -inf count as zero.

    Args:
        logits: [..., experts].

    Returns:
        float32 [], float64 for float64 logits; 0 without tokens.
    """
    total, count = torch.zeros((), device=logits.device), 0
    for flat in _tokens(logits):
        logs = torch.log_softmax(flat, -1)
        weights = logs.exp()
        total = total - torch.where(weights == 0, 0.0, weights * logs).sum()
        count += flat.shape[0]
    return total / max(1, count)


def expert_load(logits: torch.Tensor, top: int, chosen: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """How evenly tokens are spread over experts.

    Args:
        logits: [..., experts].
        top: experts per token.
        chosen: [tokens, experts] bool, where the router itself says which experts a token goes to.

    Returns:
        tokens of the emptiest and of the fullest expert as shares of the mean, and how many experts have none; `devices.widest` [].
    """
    experts = logits.shape[-1]
    if chosen is not None:
        counts = chosen.reshape(-1, experts).sum(0)
    else:
        every = torch.arange(experts, device=logits.device)
        counts = torch.zeros(experts, dtype=torch.int64, device=logits.device)
        for flat in _tokens(logits):
            places = flat.topk(min(top, experts), -1).indices
            for column in range(places.shape[1]):  # no scatter: its order of additions is not fixed on devices
                counts += (places[:, column, None] == every).sum(0)
    shares = counts.to(widest(logits))
    mean = shares.mean()
    return shares.min() / mean, shares.max() / mean, (shares == 0).sum().to(shares.dtype)


def _tokens(logits: torch.Tensor) -> Iterator[torch.Tensor]:
    """[tokens, experts], some tokens at a time."""
    experts, n = logits.shape[-1], logits.numel()
    each = max(1, _budget(logits) // max(1, experts)) * experts
    for at in range(0, n, each):
        flat = stretch(logits.detach(), at, min(at + each, n)).view(-1, experts)
        yield flat if flat.dtype == torch.float64 else flat.float()
