"""The kernel of products against its reference, on a device, and compiled for one that need not be here."""

from __future__ import annotations

from itertools import product as every

import torch

from minedraft_core.vllm.gpu import products as products_module
from minedraft_core.vllm.gpu.product_kernels import product_kernel
from minedraft_core.vllm.gpu.products import MOST_ROWS, Matrix, Norm, Products, Workspace, padded
from minedraft_core.vllm.gpu.weights import eight_bits
from tests.gpu.decode_cases import dots

SMALL = ((80, 40), (48, 130), (512, 96))  # the first in parts of different depth
LARGE = (*SMALL[1:], (576, 960), (2048, 12288))


def multiply_reference(rows: torch.Tensor, matrix: Matrix, norm: Norm | None, *, gated: bool) -> torch.Tensor:
    """`Products.multiply` in plain torch, in float32."""
    values = rows.float()
    if norm is not None:
        values = values * (values.square().mean(dim=1, keepdim=True) + norm.eps).rsqrt() * norm.weight.float()
    made = values @ matrix.weight.float().t()
    if matrix.scales is not None:
        made *= matrix.scales
    if matrix.bias is not None:
        made += matrix.bias.float()
    if gated:
        gates, ups = made.chunk(2, dim=1)
        made = torch.nn.functional.silu(gates) * ups
    return made


def compare_products(
    device: str,
    dtype: torch.dtype,
    shapes: tuple[tuple[int, int], ...],
    tolerance: float,
    sizes: tuple[int, ...] = (8, 132),
    *,
    chained: bool = False,
) -> None:
    """All that may surround a product, few and many rows, whole and in parts, rows that are part of longer ones, for devices of `sizes`."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    for (depth, outputs), multiprocessors, eight in every(shapes, sizes, (False, True)):
        products = Products(multiprocessors, chained)
        weight = random(outputs, depth) / depth**0.5
        biased = outputs % 3 == 0
        quantized, scales = eight_bits(weight)
        bias = random(outputs) if biased else None
        matrix = Matrix(quantized, bias, scales.flatten()) if eight else Matrix(weight, bias)
        assert matrix.supported
        norm = Norm(random(depth), 1e-5)
        for num_rows, gated in ((1, False), (16, True), (16, False), (17, True), (MOST_ROWS, False)):
            workspace = products.workspace([(matrix, gated)], torch.device(device))
            rows = random(num_rows, 2 * depth)[:, :depth] * 3

            def check(found: torch.Tensor, expected: torch.Tensor, workspace=workspace) -> None:
                torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)
                assert int(workspace.arrived.abs().sum()) == 0

            parts = products.tile(padded(num_rows), matrix, gated=gated).parts
            # Parts leave the workspace as they have found it.
            for _ in range(1 if parts == 1 else 2):
                check(products.multiply(rows, matrix, workspace, gated=gated), multiply_reference(rows, matrix, None, gated=gated))
                fed = products.feed(rows.contiguous(), norm)
                check(products.multiply(fed, matrix, workspace, gated=gated), multiply_reference(rows, matrix, norm, gated=gated))
            if not gated:
                _check_sums(products, rows, matrix, workspace, random, check)


def _check_sums(products: Products, rows: torch.Tensor, matrix: Matrix, workspace: Workspace, random, check) -> None:
    """A product that is added to a stream, and what it feeds to another one."""
    num_rows, width = rows.shape[0], matrix.weight.shape[0]
    longer, norm = random(num_rows + 3, width), Norm(random(width), 1e-5)
    stream, beyond = longer[:num_rows], longer[num_rows:].clone()
    after = stream.float() + multiply_reference(rows, matrix, None, gated=False)
    added = stream.clone()
    products.add(rows, matrix, workspace, added)
    check(added, after)
    fed = products.add_feeding(rows, matrix, workspace, stream, norm)
    check(stream, after)
    check(longer[num_rows:], beyond.float())
    check(fed.rows, stream.float() * norm.weight.float())
    check(fed.squares.sum(dim=0)[:num_rows] / width, stream.float().square().mean(dim=1))
    if width % 16 == 0:
        following = Matrix(random(24, width) / width**0.5)
        made = products.multiply(fed, following, products.workspace([(following, False)], rows.device))
        check(made, multiply_reference(stream, following, norm, gated=False))


def compile_products(capability: int) -> list[int]:
    """Compile the kernel as the layers of a model need it, chained and not; the shared memory of each variant, in bytes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, sizes = product_kernel, []
    floats = dict.fromkeys(("scales", "part_sums", "squares", "fed_squares"), "*fp32") | {"arrived": "*i32", "eps": "fp32"}
    for outputs, depth, eight, normed, gated, rows, chained in (
        (4096, 2048, False, True, False, 16, False),
        (4096, 2048, False, True, False, 8, True),
        (151936, 2048, True, False, False, 8, True),
        (6144, 2048, False, True, True, 64, True),
        (6144, 2048, True, True, True, 16, True),
        (2048, 6144, True, False, False, 16, True),
        (576, 1536, False, False, False, 64, True),
    ):
        cut = products_module.tile(rows, outputs, depth, 1 if eight else 2, 132, gated=gated)
        constants = {"ROWS": rows, "OUTPUTS": cut.outputs, "SLICES": cut.slices, "DEPTH": cut.depth // cut.slices, "PARTS": cut.parts}
        constants |= {"NORMED": normed, "GATED": gated, "ADDED": not normed, "FEEDING": not normed}
        constants |= {"BLOCKS": triton.next_power_of_2(triton.cdiv(depth, 16)), "BIASED": False, "SCALED": eight, "CHAINED": chained}
        names = kernel.arg_names
        pointers = dict.fromkeys(("rows", "bias", "norm", "fed", "output"), "*bf16") | {"weight": "*fp8e4nv" if eight else "*bf16"}
        signature = {name: "constexpr" if name in constants else (pointers | floats).get(name, "i32") for name in names}
        aligned = {
            (names.index(name),): [["tt.divisibility", 16]] for name in names if name not in constants and name not in ("eps", "num_rows")
        }
        source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, aligned)
        options = {"num_warps": cut.warps, "num_stages": cut.stages, "launch_pdl": chained}
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert dots(compiled.asm["ttgir"]) == 1 + gated
        sizes.append(compiled.metadata.shared)
    return sizes
