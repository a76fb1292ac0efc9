"""The attention kernel of draft steps against its reference, on a device."""

from __future__ import annotations

import torch

from minedraft_core.vllm.gpu import decode as decode_module
from minedraft_core.vllm.gpu.decode import Heads, decode, decode_reference

SHAPES = ((9, 3, 64), (16, 8, 128), (32, 4, 128), (4, 4, 16))
PAGE = 16
SHORT = (3, 1, 65, 300, 520)
LONG = (*SHORT, 20, 1100, 2500)


def compare_decode(device: str, dtype: torch.dtype, seed: int, lengths: tuple[int, ...], tolerance: float) -> None:
    """One and two new tokens, contexts from nothing to several parts, tokens that may not be written, twice with the same scratch."""
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
            for _ in range(2):
                caches, outputs = [cache.clone(), cache.clone()], [torch.zeros_like(query) for _ in range(2)]
                common = (table, seq_lens, slots.flatten(), size**-0.5)
                decode(heads, scratch, query, key, value, caches[0], outputs[0], *common)
                decode_reference(heads, query, key, value, caches[1], outputs[1], *common)
                torch.testing.assert_close(caches[0], caches[1], rtol=0, atol=0)
                torch.testing.assert_close(outputs[0], outputs[1], rtol=tolerance, atol=tolerance)
                assert int(scratch.arrived.abs().sum()) == 0


def compile_decode(capability: int) -> list[int]:
    """Compile the kernel for a GPU that need not be here; the shared memory of each variant, in bytes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers = dict.fromkeys(("query", "key", "value", "cache", "output"), "*bf16") | dict.fromkeys(
        ("table", "seq_lens", "arrived"), "*i32"
    )
    pointers |= {"slots": "*i64", "part_sums": "*fp32", "part_stats": "*fp32", "scale": "fp32"}
    kernel, sizes = decode_module._decode_kernel, []
    for num_heads, num_kv_heads, size in SHAPES:
        heads = Heads(num_heads, num_kv_heads, size, 132)
        for num_reqs, queries in ((8, 1), (64, 2)):
            constants = heads.constants(num_reqs, queries, PAGE)
            names = kernel.arg_names
            signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
            aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in names if name not in constants and name != "scale"}
            source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, aligned)
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=decode_module.LAUNCH)
            sizes.append(compiled.metadata.shared)
    return sizes
