"""The attention kernel of draft steps against its reference, on a device."""

from __future__ import annotations

import torch

from minedraft_core.vllm.gpu.decode import DraftStep, Heads, Turn, decode
from minedraft_core.vllm.gpu.decode_kernels import decode_kernel

SHAPES = ((9, 3, 64), (16, 8, 128), (32, 4, 128), (4, 4, 32), (8, 4, 256))
PAGE = 16
DOTS = 3  # of both halves of the heads, and of the values
SHORT = (3, 1, 65, 300, 520)
LONG = (*SHORT, 20, 1100, 2500)


def turned_reference(states: torch.Tensor, norm: torch.Tensor | None, turn: Turn) -> torch.Tensor:
    """Norm and rotation of heads, [tokens, heads, head]."""
    wide = states.float()
    if norm is not None:
        wide = (wide * (wide.square().mean(dim=-1, keepdim=True) + turn.eps).rsqrt() * norm.float()).to(states.dtype).float()
    cosines, sines = turn.angles[turn.positions].float()[:, None].chunk(2, dim=-1)
    left, right = wide.chunk(2, dim=-1)
    return torch.cat([left * cosines - right * sines, right * cosines + left * sines], dim=-1).to(states.dtype)


def decode_reference(
    step: DraftStep,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    output: torch.Tensor,
    scale: float,
    turn: Turn | None = None,
) -> None:
    """`decode` in plain torch, in float32."""
    if turn is not None:
        norms = turn.norms or (None, None)
        query, key = (turned_reference(states, norm, turn) for states, norm in zip((query, key), norms, strict=True))
    heads, num_reqs, page, size = step.heads, step.seq_lens.shape[0], cache.shape[2], step.heads.head_size
    queries = query.shape[0] // num_reqs
    for token in range(query.shape[0]):
        slot = int(step.slots[token])
        if slot >= 0:
            cache[slot // page, :, slot % page, :size] = key[token]
            cache[slot // page, :, slot % page, size:] = value[token]
    group = heads.num_heads // heads.num_kv_heads
    for request in range(num_reqs):
        past = max(0, int(step.seq_lens[request]) - queries)
        at = torch.arange(past, device=cache.device)
        context = cache[step.table[request, at // page].long(), :, at % page].float()
        for new in range(queries):
            token = request * queries + new
            mine = slice(request * queries, token + 1)
            keys = torch.cat([context[..., :size], key[mine].float()]).repeat_interleave(group, dim=1)
            values = torch.cat([context[..., size:], value[mine].float()]).repeat_interleave(group, dim=1)
            weights = torch.einsum("hd,nhd->hn", query[token].float(), keys).mul(scale).softmax(dim=-1)
            output[token] = torch.einsum("hn,nhd->hd", weights, values).to(output.dtype)


def compare_decode(device: str, dtype: torch.dtype, seed: int, lengths: tuple[int, ...], tolerance: float) -> None:
    """One and two new tokens, contexts from nothing to several parts, tokens that may not be written, turned or not, one scratch."""
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads, size = SHAPES[seed % len(SHAPES)]
    for multiprocessors in (1, 132):
        heads = Heads(num_heads, num_kv_heads, size, multiprocessors)
        assert heads.supported
        scratch = heads.scratch(len(lengths), torch.device(device))
        for queries in (1, 2):
            num_reqs = len(lengths)
            columns = -(-max(lengths) // PAGE) + 1
            blocks = num_reqs * columns + 1

            def random(*shape: int) -> torch.Tensor:
                return torch.randn(*shape, generator=generator).to(device, dtype)

            cache = torch.randn(blocks, PAGE, num_kv_heads, 2 * size, generator=generator).to(device, dtype).transpose(1, 2)
            table = (1 + torch.randperm(blocks - 1, generator=generator)).view(num_reqs, columns).to(device, torch.int32)
            seq_lens = torch.tensor([max(queries, length) for length in lengths], dtype=torch.int32, device=device)
            at = seq_lens.long()[:, None] - queries + torch.arange(queries, device=device)
            slots = table.gather(1, at // PAGE).long() * PAGE + at % PAGE
            slots[0] = -1
            joined = random(num_reqs * queries, num_heads + 2 * num_kv_heads, size)
            query, key, value = joined.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
            angles = torch.randn(max(lengths) + 1, size // 2, generator=generator) * 3
            turned = (at.flatten(), torch.cat([angles.cos(), angles.sin()], dim=1).to(device, dtype))
            norms = (random(size), random(size))
            turns = (None, Turn(*turned, None, 1e-6, chained=False), Turn(*turned, norms, 1e-6, chained=device != "cpu"))
            for turn in turns[: 3 if multiprocessors > 1 else 1]:
                caches, outputs = [cache.clone(), cache.clone()], [torch.zeros_like(query) for _ in range(2)]
                step = DraftStep(heads, scratch, table, seq_lens, slots.flatten())
                decode(step, query, key, value, caches[0], outputs[0], size**-0.5, turn)
                decode_reference(step, query, key, value, caches[1], outputs[1], size**-0.5, turn)
                exact = 0 if turn is None else tolerance
                torch.testing.assert_close(caches[0], caches[1], rtol=exact, atol=exact)
                torch.testing.assert_close(outputs[0], outputs[1], rtol=tolerance, atol=tolerance)
                assert int(scratch.arrived.abs().sum()) == 0


def dots(ttgir: str) -> int:
    """The matrix products of a compiled kernel."""
    return ttgir.count(" tt.dot ") + ttgir.count("ttng.warp_group_dot ")


def compile_decode(capability: int) -> list[int]:
    """Compile the kernel for a GPU that need not be here; the shared memory of each variant, in bytes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers = dict.fromkeys(("query", "key", "value", "cache", "output"), "*bf16") | dict.fromkeys(
        ("table", "seq_lens", "arrived"), "*i32"
    )
    pointers |= dict.fromkeys(("angles", "query_norm", "key_norm"), "*bf16") | {"slots": "*i64", "positions": "*i64"}
    pointers |= {"part_sums": "*fp32", "part_stats": "*fp32", "scale": "fp32", "eps": "fp32"}
    kernel, sizes = decode_kernel, []
    for num_heads, num_kv_heads, size in SHAPES:
        heads = Heads(num_heads, num_kv_heads, size, 132)
        for num_reqs, queries, turned in ((8, 1, False), (64, 2, False), (8, 1, True), (32, 2, True)):
            constants = heads.constants(num_reqs, queries, PAGE) | {"TURNED": turned, "NORMED": turned, "CHAINED": turned}
            names = kernel.arg_names
            signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
            aligned = {
                (names.index(name),): [["tt.divisibility", 16]] for name in names if name not in constants and name not in ("scale", "eps")
            }
            source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, aligned)
            options = {"num_warps": heads.warps, "launch_pdl": turned}
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            # Triton makes a matrix product of some sums, one with too few columns too, which is wrong on a card.
            assert dots(compiled.asm["ttgir"]) == DOTS
            sizes.append(compiled.metadata.shared)
    return sizes
