"""Derived numbers of a layer as 0-d tensors. Nothing waits for a device, nothing uses a random stream, autocast is off."""

from __future__ import annotations

import torch

from msprobe_integrations.torch.devices import widest

PIECE = {"cpu": 1 << 20}
"""Attention weights that are in memory at a time, by type of device."""
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
    budget = PIECE.get(q.device.type, _PIECE)
    per_time = max(1, min(heads, budget // max(1, rows * keys)))
    block = max(1, min(rows, budget // max(1, keys)))
    dtype, wide = torch.float64 if q.dtype == torch.float64 else torch.float32, widest(q)
    entropy = torch.zeros((), dtype=wide, device=q.device)
    largest = torch.zeros_like(entropy)
    first_key = keys - rows
    for b in range(batches):
        for h in range(0, heads, per_time):
            some = q[b, h : h + per_time].to(dtype)
            low, high = h // share, (h + some.shape[0] - 1) // share + 1
            fitting = k[b, low:high].to(dtype)
            if share > 1:
                fitting = fitting.repeat_interleave(share, 0)[h - low * share :][: some.shape[0]]
            for i in range(0, rows, block):
                last = min(i + block, rows)
                seen = max(1, min(keys, last + first_key))  # the keys behind are masked for all rows of the block
                weights = torch.matmul(some[:, i:last], fitting[:, :seen].transpose(1, 2)).div_(d**0.5)
                here = torch.arange(i + first_key, last + first_key, device=q.device)[:, None]
                weights.masked_fill_(torch.arange(seen, device=q.device) > here, _MASKED)
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

    A large matrix of another type than float32 is made float32 in pieces, anew for every product.

    Args:
        weight: [m, n] float.
        start: [n] float32, of length 1: `start_vector`, or what the last call returned.
        iterations: upper bound.

    Returns:
        the norm, `devices.widest` [], and where the next call may begin, [n] float32.
    """
    matrix = weight.detach()
    rows, pieces = matrix.shape[0], max(1, _PIECE // max(1, matrix.shape[1]))
    if matrix.dtype == torch.float32 or rows <= pieces:
        matrix, pieces = matrix.float(), max(1, rows)
    most = min(iterations, matrix.shape[0] + 1, matrix.shape[1])  # where it begins need not lie in the space of the rows
    vectors = matrix.new_zeros(most, matrix.shape[1], dtype=torch.float32)
    images = matrix.new_zeros(most, matrix.shape[0], dtype=torch.float32)
    on_host = matrix.device.type == "cpu"
    values: list[float] = []
    v = start
    for i in range(most):
        vectors[i] = v
        for at in range(0, rows, pieces):
            images[i, at : at + pieces] = torch.mv(matrix[at : at + pieces].float(), v)
        if on_host:
            values.append(_largest(images[: i + 1])[0].item())
            if len(values) > _STEADY and not values[-1] - values[-1 - _STEADY] > _TOLERANCE * values[-1]:
                most = i + 1
                break
        v = torch.mv(matrix[:pieces].float().t(), images[i, :pieces])
        for at in range(pieces, rows, pieces):
            v += torch.mv(matrix[at : at + pieces].float().t(), images[i, at : at + pieces])
        for _ in range(2):  # once leaves what rounding has left
            v = v - torch.mv(vectors[: i + 1].t(), torch.mv(vectors[: i + 1], v))
        v = v / torch.linalg.vector_norm(v).clamp_min(_TINY)
    square, shares = _largest(images[:most])
    best = torch.mv(vectors[:most].t(), shares.float())
    return square.clamp_min(0).sqrt(), best / torch.linalg.vector_norm(best).clamp_min(_TINY)


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
    vectors = weight.detach().to(widest(weight))
    vectors = vectors if vectors.shape[0] < vectors.shape[1] else vectors.t()
    n = vectors.shape[0]
    if n < 2:
        return vectors.new_zeros(())
    unit = vectors / torch.linalg.vector_norm(vectors, dim=1, keepdim=True).clamp_min(1e-12)
    # the sum over all pairs, without the matrix of them: |sum of all|^2 has every pair twice, and each with itself
    mean: torch.Tensor = (unit.sum(0).square().sum() - unit.square().sum()) / (n * (n - 1))
    return mean


def token_entropy(logits: torch.Tensor) -> torch.Tensor:
    """Mean over tokens of the entropy (nats) of ``softmax(logits)`` over experts; experts masked with -inf count as zero.

    Args:
        logits: [..., experts].

    Returns:
        float32 [], float64 for float64 logits; 0 without tokens.
    """
    flat = _tokens(logits)
    if not flat.shape[0]:
        return torch.zeros((), device=logits.device)
    logs = torch.log_softmax(flat, -1)
    weights = logs.exp()
    mean: torch.Tensor = -torch.where(weights == 0, 0.0, weights * logs).sum(-1).mean()
    return mean


def expert_load(logits: torch.Tensor, top: int, chosen: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """How evenly tokens are spread over experts.

    Args:
        logits: [..., experts].
        top: experts per token.
        chosen: [tokens, experts] bool, where the router itself says which experts a token goes to.

    Returns:
        tokens of the emptiest and of the fullest expert as shares of the mean, and how many experts have none; `devices.widest` [].
    """
    flat = _tokens(logits)
    experts = flat.shape[-1]
    if chosen is not None:
        counts = chosen.reshape(-1, experts).sum(0)
    else:
        places = flat.topk(min(top, experts), -1).indices
        every = torch.arange(experts, device=flat.device)
        counts = torch.zeros(experts, dtype=torch.int64, device=flat.device)
        for column in range(places.shape[1]):  # no scatter: its order of additions is not fixed on devices
            counts += (places[:, column, None] == every).sum(0)
    shares = counts.to(widest(flat))
    mean = shares.mean()
    return shares.min() / mean, shares.max() / mean, (shares == 0).sum().to(shares.dtype)


def _tokens(logits: torch.Tensor) -> torch.Tensor:
    flat = logits.detach().reshape(-1, logits.shape[-1])
    return flat if flat.dtype == torch.float64 else flat.float()
