"""What the tests look for in the compiler's texts: the loop that multiplies, and values that came from other lanes."""

import re

_TENSOR_CORE = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)")
_MULTIPLY_ADD = re.compile(r"\bfma\.rn\.f32")


def main_loop(ptx):
    """The lines of the PTX's loop with the most products, from its label to the branch back to it.

    Products are those of tensor cores, where it has any: the loop of a bias multiplies too.
    """
    product = _TENSOR_CORE if _TENSOR_CORE.search(ptx) else _MULTIPLY_ADD
    lines = ptx.splitlines()
    labels = {match[1]: i for i, line in enumerate(lines) if (match := re.match(r"(\$\w+):", line))}
    loops = []
    for i, line in enumerate(lines):
        target = re.search(r"\bbra(?:\.uni)?\s+(\$\w+)", line)
        if target and labels[target[1]] <= i:
            loops.append("\n".join(lines[labels[target[1]] : i + 1]))
    return max(loops, key=lambda loop: len(product.findall(loop)))


def copied_bytes(loop):
    """What a thread's cp.async of these lines copy to shared memory."""
    return sum(int(size, 0) for size in re.findall(r"\bcp\.async\.c[ag]\b[^;]*?\],[^;]*?\], (0x\w+|\d+)", loop))


def contracted_sums(text, kind):
    """Multiply-adds whose addend came from another lane, in "ptx", "sass" or "amdgcn".

    There a product was contracted with the first addition of a reduction: rounded in one lane and not in the other
    (`_partials.rounded_product`).
    """
    return list(_CONTRACTED[kind](text.splitlines()))


def _in_ptx(lines):
    """A register is assigned once in PTX, a loop's apart, so that what came from a lane stays known."""
    shuffled = set()
    for line in lines:
        operands = re.findall(r"%\w+", line)
        packs = re.search(r"\bmov\.b64\b.*\{", line) and shuffled.intersection(operands[1:])  # for an f32x2
        if packs or re.search(r"\bshfl\.sync\.bfly", line):
            shuffled.add(operands[0])
        elif re.search(r"\bfma\.rn", line) and operands[-1] in shuffled:
            yield line.strip()


_RESIDUAL = re.compile(r"-(R\d+)(?:\.reuse)?, \1\b")  # x - y², of a square root that is rounded correctly


def _in_sass(lines):
    shuffled = set()
    for line in lines:
        instruction = re.match(r"\s*/\*\w+\*/\s+(?:@!?U?P\w+ )?([\w.]+)(.*?);", line)
        registers = re.findall(r"\bR(\d+)", instruction[2]) if instruction else ()
        if not registers:
            continue
        name, target = instruction[1], int(registers[0])
        addend = re.search(r"\bR(\d+)[^,]*$", instruction[2])  # none where it is zero
        if name.startswith("FFMA") and addend and not _RESIDUAL.search(instruction[2]):
            of_pair = {int(addend[1]) + 1} if name.startswith("FFMA2") else set()
            if shuffled & {int(addend[1]), *of_pair}:
                yield instruction[0].strip()
        shuffled -= {target, target + 1} if ".64" in name or name.startswith(("CS2R", "FFMA2")) else {target}
        if name.startswith("SHFL.BFLY"):
            shuffled.add(target)


def _in_amdgcn(lines):
    shuffled = set()
    for line in lines:
        name, _, operands = line.strip().partition(" ")
        registers = re.findall(r"\bv\d+", operands)
        if not registers:
            continue
        addend = operands.split(",")[-1].strip() if re.match(r"v_(?:pk_)?(?:fma|mad)_", name) else registers[0]
        if re.match(r"v_(?:pk_)?(?:fma|fmac|mad|mac)_", name) and addend in shuffled:
            yield line.strip()
        shuffled.discard(registers[0])
        if name.startswith(("ds_bpermute", "ds_swizzle", "v_mov_b32_dpp", "v_permlane")):
            shuffled.add(registers[0])


_CONTRACTED = {"ptx": _in_ptx, "sass": _in_sass, "amdgcn": _in_amdgcn}
