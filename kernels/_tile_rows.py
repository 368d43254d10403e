"""The rows of the tile table, as data: one line a row, first match wins, the last of a group fits every shape.

Columns, separated by blanks (a tile search may rewrite any line; `_tiles._parse` is the format's definition)
    verb    of the kernel; "weighted_sum:flat" names its layout as well
    archs   that the row is for, separated by commas
    dtype   of the products: 16-bit or fp32
    when    conditions on T, D, P and DP (D·P), separated by commas: T<=16, D>=65, D%16; * for any
    tile    blocks of T, D, P and K (the features that a Gram tile reduces over), in this order
    w s     warps, and stages of loads in flight
    part    the least positions of a part where a sample's outer product is split over T; 0 never splits
    load    tma: through tensor descriptors where strides allow it; ptr: through pointers
    | source

A source says what was measured, or else it is static analysis: the compiler's counts of registers, spills and shared
memory and the instructions it chose, which the tests hold for each row.

Why the blocks are what they are
- 16-bit: a tile's FLOPs per byte of its loads are BD·BP / (BD + BP): 64 at 128×128, 85 at 256×128, which two
  accumulators of a chained sum do not leave registers for. So 256×128 serves samples of one chain, 128×128 the others.
- Thin layers (LoRA): one block of 16, 32 or 64. Warpgroup MMA and tcgen05 take 64 rows at least, but 8 columns at
  least, so the kernel puts a thin P there.
- T <= 16, 32: no more masked positions than a tensor core's step has anyway.
- Convolutions (T long, D·P small): small blocks and short parts, so that one sample has enough programs.
- sm_80's rows also serve sm_86, sm_89 and sm_12x, where programs share 99 KiB: stages fill that for as many programs as
  registers leave room for. Both operands of a step lie there.
- LM heads: the general rows' tiles so far, in rows of their own; enough tiles to never split T.
- Gram tiles hold three accumulators: B's sum, A's sum and A's chain. At 128×128 on sm_90 they fit where a step is a
  whole chain (steps of 64: 43 spill instructions); on sm_100 and sm_80 they do not, so tiles are 64×64 there.
- Rows not a multiple of 16 long are loaded element by element through pointers with a 64-bit address each: blocks of
  4096 elements at most an operand and step. Those of large layers are copied to the next multiple first
  (`_tiles.row_step`), and conditions are asked of the copies' lengths.
- Row norms: a program's blocks of features wait for each other, so a block has many features and few rows. Of 2048 rows
  of 2048 features there are a thousand programs then, each with all its loads in flight.
- fp32 is IEEE: fused multiply-adds on the ordinary cores, where 64×64 by 16 fits the registers.
  Gram tiles of fp32 keep to pointers: with descriptors they take 168 registers instead of 128 on sm_90, which leaves a
  multiprocessor one program instead of two. Those of large samples read copies, positions next to each other
  (`_tiles.turns`), and keep to pointers anyway.
- interpreter: small blocks, so that small inputs have several tiles of each kind; both ways of loading.
"""

TABLE = """
# verb archs dtype when tile w s part load | source
row_sq_norm sm_80,sm_90,sm_100,gfx942,interpreter 16-bit D<=64,D%16 T64D64 4 2 0 ptr | one block of features, 32 elements a thread
row_sq_norm sm_80,sm_90,sm_100,gfx942,interpreter 16-bit D<=64 T32D64 4 2 0 ptr | one block of features, loaded element by element
row_sq_norm interpreter 16-bit * T8D512 4 2 0 ptr | small blocks
row_sq_norm sm_80,sm_90,sm_100,gfx942 16-bit D<=512 T8D512 4 2 0 ptr | 4096 elements a program, 32 a thread
row_sq_norm sm_80,sm_90,sm_100,gfx942 16-bit D<=1024 T4D1024 4 2 0 ptr | the same, one block of features
row_sq_norm sm_80,sm_90,sm_100,gfx942 16-bit * T2D2048 4 2 0 ptr | the same, few blocks of features: one waits for the other
row_sq_norm sm_80,sm_90,sm_100,gfx942,interpreter fp32 D<=64,D%16 T64D64 4 2 0 ptr | one block of features, 32 elements a thread
row_sq_norm sm_80,sm_90,sm_100,gfx942,interpreter fp32 D<=64 T32D64 4 2 0 ptr | one block of features, loaded element by element
row_sq_norm interpreter fp32 * T8D512 4 2 0 ptr | small blocks
row_sq_norm sm_80,sm_90,sm_100,gfx942 fp32 D<=512 T8D512 4 2 0 ptr | 4096 elements a program, 32 a thread
row_sq_norm sm_80,sm_90,sm_100,gfx942 fp32 D<=1024 T4D1024 4 2 0 ptr | the same, one block of features
row_sq_norm sm_80,sm_90,sm_100,gfx942 fp32 * T2D2048 4 2 0 ptr | the same, few blocks of features: one waits for the other

# outer_product sm_80
outer_product sm_80 16-bit T<=16,D>=65,P>=65,D%16,P%16 T16D128P128 8 2 0 ptr | HMMA, one step of 16 positions
outer_product sm_80 16-bit T<=32,D>=65,P>=65,D%16,P%16 T32D128P128 8 2 0 ptr | HMMA, one step of 32 positions
outer_product sm_80 16-bit T>=1024,DP<=65536,D>=33,P>=33 T32D64P64 8 3 256 ptr | convolutions: 16 KiB a part, 128 positions' worth of loads
outer_product sm_80 16-bit D<=64,P<=64 T32D64P64 4 4 512 ptr | HMMA, 64 rows at least
outer_product sm_80 16-bit P<=16 T32D128P16 4 4 256 ptr | HMMA, P in the 16 columns
outer_product sm_80 16-bit P<=32 T32D128P32 4 4 512 ptr | HMMA, P in the 32 columns
outer_product sm_80 16-bit P<=64 T32D128P64 4 5 512 ptr | HMMA, P in the 64 columns; two programs' stages fit 99 KiB
outer_product sm_80 16-bit D<=16 T32D16P128 4 4 256 ptr | HMMA, D in the 16 columns
outer_product sm_80 16-bit D<=32 T32D32P128 4 4 512 ptr | HMMA, D in the 32 columns
outer_product sm_80 16-bit D<=64 T32D64P128 4 5 512 ptr | HMMA, D in the 64 columns; two programs' stages fit 99 KiB
outer_product sm_80 16-bit P>=65536,D%16,P%16 T64D128P128 8 4 0 ptr | LM head: as the general row, never split
outer_product sm_80 16-bit D%16,P%16 T64D128P128 8 4 1024 ptr | two accumulators of 64 registers (218 in all), 64 FLOP a byte, 96 KiB of stages
outer_product sm_80 16-bit * T32D64P128 8 3 512 ptr | element by element, 4096 elements of the larger operand
# outer_product sm_90,sm_100
outer_product sm_90,sm_100 16-bit T<=16,D>=65,P>=65,D%16,P%16 T16D128P128 8 2 0 tma | HGMMA or UTCHMMA, one step of 16 positions
outer_product sm_90,sm_100 16-bit T<=32,D>=65,P>=65,D%16,P%16 T32D128P128 8 2 0 tma | HGMMA or UTCHMMA, one step of 32 positions
outer_product sm_90,sm_100 16-bit T>=1024,DP<=65536,D>=33,P>=33,D%16,P%16 T64D64P64 4 3 256 tma | convolutions: 16 KiB a part, 128 positions' worth of loads
outer_product sm_90 16-bit T>=1024,DP<=65536,D>=33,P>=33 T64D64P64 4 3 256 ptr | convolutions; measured on an H200, 2026-11-26: ResNet stem 0.141 ms, 0.178 at 32 positions
outer_product sm_100 16-bit T>=1024,DP<=65536,D>=33,P>=33 T32D64P64 4 3 256 ptr | convolutions: 16 KiB a part, 128 positions' worth of loads
outer_product sm_90,sm_100 16-bit D<=64,P<=64 T64D64P64 4 4 512 tma | HGMMA or UTCHMMA, 64 rows at least
outer_product sm_90 16-bit P<=16 T64D128P16 4 2 256 tma | measured on an H200, 2026-11-26: LoRA A 0.0501 ms, 0.0519 in four stages
outer_product sm_100 16-bit P<=16 T64D128P16 4 4 256 tma | HGMMA or UTCHMMA, P in the 16 columns
outer_product sm_90,sm_100 16-bit P<=32 T64D128P32 4 4 512 tma | HGMMA or UTCHMMA, P in the 32 columns
outer_product sm_90,sm_100 16-bit P<=64,D%16,P%16 T64D128P64 4 4 512 tma | HGMMA or UTCHMMA, P in the 64 columns
outer_product sm_90 16-bit D<=16 T64D16P128 4 3 256 tma | measured on an H200, 2026-11-26: LoRA B 0.0501 ms, 0.0523 in four stages
outer_product sm_100 16-bit D<=16 T64D16P128 4 4 256 tma | HGMMA or UTCHMMA, D in the 16 columns
outer_product sm_90,sm_100 16-bit D<=32 T64D32P128 4 4 512 tma | HGMMA or UTCHMMA, D in the 32 columns
outer_product sm_90,sm_100 16-bit D<=64,D%16,P%16 T64D64P128 4 4 512 tma | HGMMA or UTCHMMA, D in the 64 columns
outer_product sm_90 16-bit P>=65536,D%16,P%16 T64D64P128 4 3 0 tma | LM head; measured on an H200, 2026-11-26: Llama-3.2-1B head 2.65 ms, 2.86 at 128×128
outer_product sm_100 16-bit P>=65536,D%16,P%16 T64D128P128 8 4 0 tma | LM head: two accumulators of 64 registers, never split
outer_product sm_90 16-bit D%16,P%16 T64D64P128 4 3 1024 tma | measured on an H200, 2026-11-26: Llama-3.2-1B up 0.621 ms, 0.677 at 128×128; two programs a multiprocessor hide start and end
outer_product sm_100 16-bit D%16,P%16 T64D128P128 8 4 1024 tma | two accumulators of 64 registers (144 and 150 in all), 64 FLOP a byte
outer_product sm_90 16-bit * T32D64P128 8 3 512 tma | element by element, 4096 elements of the larger operand
outer_product sm_100 16-bit * T32D64P128 4 3 512 tma | element by element; 8 warps spill with Triton 3.6
# outer_product gfx942
outer_product gfx942 16-bit T<=16,D>=65,P>=65,D%16,P%16 T16D128P128 8 2 0 ptr | mfma, one step of 16 positions
outer_product gfx942 16-bit T<=32,D>=65,P>=65,D%16,P%16 T32D128P128 8 2 0 ptr | mfma, one step of 32 positions
outer_product gfx942 16-bit T>=1024,DP<=65536,D>=33,P>=33 T32D64P64 4 2 256 ptr | convolutions: 16 KiB a part, 128 positions' worth of loads
outer_product gfx942 16-bit D<=64,P<=64 T64D64P64 4 2 512 ptr | mfma, 64 rows at least
outer_product gfx942 16-bit P<=16 T64D128P16 4 2 256 ptr | mfma, P in the 16 columns
outer_product gfx942 16-bit P<=32 T64D128P32 4 2 512 ptr | mfma, P in the 32 columns
outer_product gfx942 16-bit P<=64 T64D128P64 4 2 512 ptr | mfma, P in the 64 columns
outer_product gfx942 16-bit D<=16 T64D16P128 4 2 256 ptr | mfma, D in the 16 columns
outer_product gfx942 16-bit D<=32 T64D32P128 4 2 512 ptr | mfma, D in the 32 columns
outer_product gfx942 16-bit D<=64 T64D64P128 4 2 512 ptr | mfma, D in the 64 columns
outer_product gfx942 16-bit P>=65536,D%16,P%16 T64D128P128 8 2 0 ptr | LM head: two accumulators of 64 registers, never split
outer_product gfx942 16-bit D%16,P%16 T64D128P128 8 2 1024 ptr | two accumulators of 64 registers, 64 FLOP a byte
outer_product gfx942 16-bit * T32D64P128 8 2 512 ptr | element by element, 4096 elements of the larger operand
# outer_product fp32
outer_product sm_80,gfx942 fp32 T>=1024,DP<=65536,D>=33,P>=33 T16D64P64 8 3 256 ptr | convolutions: short parts
outer_product sm_80,gfx942 fp32 P<=16 T32D64P16 4 3 256 ptr | P in 16 columns
outer_product sm_80,gfx942 fp32 D<=16 T32D16P64 4 3 256 ptr | D in 16 columns
outer_product sm_80,gfx942 fp32 P>=65536 T16D64P64 8 3 0 ptr | LM head: never split
outer_product sm_80,gfx942 fp32 * T16D64P64 8 3 1024 ptr | IEEE multiply-adds, twice 16 accumulators a thread
outer_product sm_90,sm_100 fp32 T>=1024,DP<=65536,D>=33,P>=33 T16D64P64 8 3 256 tma | convolutions: short parts
outer_product sm_90,sm_100 fp32 P<=16 T32D64P16 4 3 256 tma | P in 16 columns
outer_product sm_90,sm_100 fp32 D<=16 T32D16P64 4 3 256 tma | D in 16 columns
outer_product sm_90 fp32 P>=65536 T16D64P64 4 3 0 ptr | LM head: never split, else as the general row
outer_product sm_100 fp32 P>=65536 T16D64P64 8 3 0 tma | LM head: never split
outer_product sm_90 fp32 * T16D64P64 4 3 1024 ptr | measured on an H200, 2026-11-26: GPT-2 up 0.942 ms, 1.31 with 8 warps and descriptors
outer_product sm_100 fp32 * T16D64P64 8 3 1024 tma | IEEE multiply-adds, twice 16 accumulators a thread
# outer_norm sm_80
outer_norm sm_80 16-bit T<=16,D>=65,P>=65,D%16,P%16 T16D128P128 8 2 0 ptr | HMMA, one step of 16 positions
outer_norm sm_80 16-bit T<=32,D>=65,P>=65,D%16,P%16 T32D128P128 8 2 0 ptr | HMMA, one step of 32 positions
outer_norm sm_80 16-bit T<=128,D>=129,P>=65,D%16,P%16 T32D256P128 8 4 0 ptr | HMMA, one chain, 85 FLOP a byte, 72 KiB of stages
outer_norm sm_80 16-bit T>=1024,DP<=65536,D>=33,P>=33 T32D64P64 4 3 256 ptr | convolutions: 16 KiB a part, 128 positions' worth of loads
outer_norm sm_80 16-bit D<=64,P<=64 T32D64P64 4 4 512 ptr | HMMA, 64 rows at least
outer_norm sm_80 16-bit P<=16 T32D128P16 4 4 256 ptr | HMMA, P in the 16 columns
outer_norm sm_80 16-bit P<=32 T32D128P32 4 4 512 ptr | HMMA, P in the 32 columns
outer_norm sm_80 16-bit P<=64 T32D128P64 4 5 512 ptr | HMMA, P in the 64 columns; two programs' stages fit 99 KiB
outer_norm sm_80 16-bit D<=16 T32D16P128 4 4 256 ptr | HMMA, D in the 16 columns
outer_norm sm_80 16-bit D<=32 T32D32P128 4 4 512 ptr | HMMA, D in the 32 columns
outer_norm sm_80 16-bit D<=64 T32D64P128 4 5 512 ptr | HMMA, D in the 64 columns; two programs' stages fit 99 KiB
outer_norm sm_80 16-bit P>=65536,D%16,P%16 T64D128P128 8 4 0 ptr | LM head: as the general row, never split
outer_norm sm_80 16-bit D%16,P%16 T64D128P128 8 4 1024 ptr | two accumulators of 64 registers (218 in all), 64 FLOP a byte, 96 KiB of stages
outer_norm sm_80 16-bit * T32D64P128 8 3 512 ptr | element by element, 4096 elements of the larger operand
# outer_norm sm_90,sm_100
outer_norm sm_90,sm_100 16-bit T<=16,D>=65,P>=65,D%16,P%16 T16D128P128 8 2 0 tma | HGMMA or UTCHMMA, one step of 16 positions
outer_norm sm_90,sm_100 16-bit T<=32,D>=65,P>=65,D%16,P%16 T32D128P128 8 2 0 tma | HGMMA or UTCHMMA, one step of 32 positions
outer_norm sm_90,sm_100 16-bit T<=128,D>=129,P>=65,D%16,P%16 T64D256P128 8 4 0 tma | HGMMA or UTCHMMA, one chain, 85 FLOP a byte, 192 KiB of stages
outer_norm sm_90,sm_100 16-bit T>=1024,DP<=65536,D>=33,P>=33,D%16,P%16 T64D64P64 4 3 256 tma | convolutions: 16 KiB a part, 128 positions' worth of loads
outer_norm sm_90 16-bit T>=1024,DP<=65536,D>=33,P>=33 T64D64P64 4 3 256 ptr | convolutions; measured on an H200, 2026-11-26: ResNet stem 0.145 ms, 0.184 at 32 positions
outer_norm sm_100 16-bit T>=1024,DP<=65536,D>=33,P>=33 T32D64P64 4 3 256 ptr | convolutions: 16 KiB a part, 128 positions' worth of loads
outer_norm sm_90,sm_100 16-bit D<=64,P<=64 T64D64P64 4 4 512 tma | HGMMA or UTCHMMA, 64 rows at least
outer_norm sm_90 16-bit P<=16 T64D128P16 4 2 256 tma | measured on an H200, 2026-11-26: LoRA A 0.0524 ms, 0.0542 in four stages
outer_norm sm_100 16-bit P<=16 T64D128P16 4 4 256 tma | HGMMA or UTCHMMA, P in the 16 columns
outer_norm sm_90,sm_100 16-bit P<=32 T64D128P32 4 4 512 tma | HGMMA or UTCHMMA, P in the 32 columns
outer_norm sm_90,sm_100 16-bit P<=64,D%16,P%16 T64D128P64 4 4 512 tma | HGMMA or UTCHMMA, P in the 64 columns
outer_norm sm_90 16-bit D<=16 T64D16P128 4 2 256 tma | measured on an H200, 2026-11-26: LoRA B 0.0529 ms, 0.0551 in four stages
outer_norm sm_100 16-bit D<=16 T64D16P128 4 4 256 tma | HGMMA or UTCHMMA, D in the 16 columns
outer_norm sm_90,sm_100 16-bit D<=32 T64D32P128 4 4 512 tma | HGMMA or UTCHMMA, D in the 32 columns
outer_norm sm_90,sm_100 16-bit D<=64,D%16,P%16 T64D64P128 4 4 512 tma | HGMMA or UTCHMMA, D in the 64 columns
outer_norm sm_90 16-bit P>=65536,D%16,P%16 T64D64P128 4 3 0 tma | LM head; measured on an H200, 2026-11-26: Llama-3.2-1B head 2.30 ms, 2.83 at 128×128
outer_norm sm_100 16-bit P>=65536,D%16,P%16 T64D128P128 8 4 0 tma | LM head: two accumulators of 64 registers, never split
outer_norm sm_90 16-bit D%16,P%16 T64D64P128 4 3 1024 tma | measured on an H200, 2026-11-26: Llama-3.2-1B up 0.569 ms, 0.605 at 128×128 (256×128: 0.561, but it spills)
outer_norm sm_100 16-bit D%16,P%16 T64D128P128 8 4 1024 tma | two accumulators of 64 registers (144 and 150 in all), 64 FLOP a byte
outer_norm sm_90,sm_100 16-bit * T32D64P128 8 3 512 tma | element by element, 4096 elements of the larger operand
# outer_norm gfx942
outer_norm gfx942 16-bit T<=16,D>=65,P>=65,D%16,P%16 T16D128P128 8 2 0 ptr | mfma, one step of 16 positions
outer_norm gfx942 16-bit T<=32,D>=65,P>=65,D%16,P%16 T32D128P128 8 2 0 ptr | mfma, one step of 32 positions
outer_norm gfx942 16-bit T>=1024,DP<=65536,D>=33,P>=33 T32D64P64 4 2 256 ptr | convolutions: 16 KiB a part, 128 positions' worth of loads
outer_norm gfx942 16-bit D<=64,P<=64 T64D64P64 4 2 512 ptr | mfma, 64 rows at least
outer_norm gfx942 16-bit P<=16 T64D128P16 4 2 256 ptr | mfma, P in the 16 columns
outer_norm gfx942 16-bit P<=32 T64D128P32 4 2 512 ptr | mfma, P in the 32 columns
outer_norm gfx942 16-bit P<=64 T64D128P64 4 2 512 ptr | mfma, P in the 64 columns
outer_norm gfx942 16-bit D<=16 T64D16P128 4 2 256 ptr | mfma, D in the 16 columns
outer_norm gfx942 16-bit D<=32 T64D32P128 4 2 512 ptr | mfma, D in the 32 columns
outer_norm gfx942 16-bit D<=64 T64D64P128 4 2 512 ptr | mfma, D in the 64 columns
outer_norm gfx942 16-bit P>=65536,D%16,P%16 T64D128P128 8 2 0 ptr | LM head: two accumulators of 64 registers, never split
outer_norm gfx942 16-bit D%16,P%16 T64D128P128 8 2 1024 ptr | two accumulators of 64 registers, 64 FLOP a byte
outer_norm gfx942 16-bit * T32D64P128 8 2 512 ptr | element by element, 4096 elements of the larger operand
# outer_norm fp32
outer_norm sm_80,gfx942 fp32 T>=1024,DP<=65536,D>=33,P>=33 T16D64P64 8 3 256 ptr | convolutions: short parts
outer_norm sm_80,gfx942 fp32 P<=16 T32D64P16 4 3 256 ptr | P in 16 columns
outer_norm sm_80,gfx942 fp32 D<=16 T32D16P64 4 3 256 ptr | D in 16 columns
outer_norm sm_80,gfx942 fp32 P>=65536 T16D64P64 8 3 0 ptr | LM head: never split
outer_norm sm_80,gfx942 fp32 * T16D64P64 8 3 1024 ptr | IEEE multiply-adds, twice 16 accumulators a thread
outer_norm sm_90,sm_100 fp32 T>=1024,DP<=65536,D>=33,P>=33 T16D64P64 8 3 256 tma | convolutions: short parts
outer_norm sm_90,sm_100 fp32 P<=16 T32D64P16 4 3 256 tma | P in 16 columns
outer_norm sm_90,sm_100 fp32 D<=16 T32D16P64 4 3 256 tma | D in 16 columns
outer_norm sm_90 fp32 P>=65536 T16D64P64 4 3 0 ptr | LM head: never split, else as the general row
outer_norm sm_100 fp32 P>=65536 T16D64P64 8 3 0 tma | LM head: never split
outer_norm sm_90 fp32 * T16D64P64 4 3 1024 ptr | measured on an H200, 2026-11-26: GPT-2 up 0.959 ms, 1.31 with 8 warps and descriptors
outer_norm sm_100 fp32 * T16D64P64 8 3 1024 tma | IEEE multiply-adds, twice 16 accumulators a thread
# gram_norm sm_80
gram_norm sm_80 16-bit T<=16,D%16,P%16 T16K64 1 3 0 ptr | one warp a tile of 16 rows
gram_norm sm_80 16-bit T<=32,D%16,P%16 T32K64 4 3 0 ptr | HMMA: warpgroup MMA starts at 64 rows
gram_norm sm_80 16-bit T<=64,D%16,P%16 T64K64 4 3 0 ptr | three accumulators of 32 registers
gram_norm sm_80 16-bit P>=65536,D%16,P%16 T64K64 4 3 0 ptr | LM head: as the general row
gram_norm sm_80 16-bit D%16,P%16 T64K64 4 3 0 ptr | B and two accumulators of A stay in 178 registers, which 128 rows spill with Triton 3.6
gram_norm sm_80 16-bit T<=32 T32K32 4 2 0 ptr | element by element
gram_norm sm_80 16-bit * T64K32 8 2 0 ptr | element by element, 16 accumulators a thread
# gram_norm sm_90
gram_norm sm_90 16-bit T<=16,D%16,P%16 T16K128 1 3 0 tma | one warp a tile of 16 rows
gram_norm sm_90 16-bit T<=32,D%16,P%16 T32K128 4 3 0 tma | HMMA: warpgroup MMA starts at 64 rows
gram_norm sm_90 16-bit T<=64,D%16,P%16 T64K128 4 3 0 tma | three accumulators of 32 registers
gram_norm sm_90 16-bit P>=65536,D%16,P%16 T128K128 8 3 0 tma | LM head; measured on an H200, 2026-11-26: Llama-3.2-1B head 0.772 ms, 1.21 in two stages
gram_norm sm_90 16-bit D%16,P%16 T128K128 8 3 0 tma | measured on an H200, 2026-11-26: Llama-3.2-1B up 0.208 ms, 0.314 in two stages
gram_norm sm_90 16-bit T<=32 T32K32 4 2 0 tma | element by element
gram_norm sm_90 16-bit * T64K32 8 2 0 tma | element by element, 16 accumulators a thread
# gram_norm sm_100
gram_norm sm_100 16-bit T<=16,D%16,P%16 T16K128 1 3 0 tma | one warp a tile of 16 rows
gram_norm sm_100 16-bit T<=32,D%16,P%16 T32K128 4 3 0 tma | HMMA: warpgroup MMA starts at 64 rows
gram_norm sm_100 16-bit T<=64,D%16,P%16 T64K128 4 3 0 tma | three accumulators of 32 registers
gram_norm sm_100 16-bit P>=65536,D%16,P%16 T64K128 4 3 0 tma | LM head: as the general row
gram_norm sm_100 16-bit D%16,P%16 T64K128 4 3 0 tma | B and two accumulators of A stay in registers, which 128 rows spill
gram_norm sm_100 16-bit T<=32 T32K32 4 2 0 tma | element by element
gram_norm sm_100 16-bit * T64K32 8 2 0 tma | element by element, 16 accumulators a thread
# gram_norm gfx942
gram_norm gfx942 16-bit T<=16,D%16,P%16 T16K64 1 2 0 ptr | one warp a tile of 16 rows
gram_norm gfx942 16-bit T<=32,D%16,P%16 T32K64 4 2 0 ptr | HMMA: warpgroup MMA starts at 64 rows
gram_norm gfx942 16-bit T<=64,D%16,P%16 T64K64 4 2 0 ptr | three accumulators of 32 registers
gram_norm gfx942 16-bit P>=65536,D%16,P%16 T64K64 4 2 0 ptr | LM head: as the general row
gram_norm gfx942 16-bit D%16,P%16 T64K64 4 2 0 ptr | B and two accumulators of A stay in registers
gram_norm gfx942 16-bit T<=32 T32K32 4 2 0 ptr | element by element
gram_norm gfx942 16-bit * T64K32 8 2 0 ptr | element by element, 16 accumulators a thread
# gram_norm fp32
gram_norm sm_80,sm_90,sm_100,gfx942 fp32 T<=32 T32K16 4 3 0 ptr | IEEE multiply-adds, few masked rows
gram_norm sm_80,sm_90,sm_100,gfx942 fp32 P>=65536 T64K16 8 3 0 ptr | LM head: as the general row
gram_norm sm_80,sm_90,sm_100,gfx942 fp32 * T64K16 8 3 0 ptr | IEEE multiply-adds, three times 16 accumulators a thread
# weighted_sum sm_80
weighted_sum:flat sm_80 16-bit T<=63,D<=64,P<=64,D%16,P%16 T32D64P64 4 7 0 ptr | the weighted operand from registers
weighted_sum:flat sm_80 16-bit T<=63,D<=16,D%16,P%16 T32D16P128 4 7 0 ptr | D in 16 columns
weighted_sum:flat sm_80 16-bit T<=63,D<=64,D%16,P%16 T32D64P128 8 7 0 ptr | the weighted operand from registers
weighted_sum:flat sm_80 16-bit T<=63,P<=64,D%16,P%16 T32D64P64 4 7 0 ptr | the weighted operand from registers
weighted_sum:flat sm_80 16-bit T<=63,P>=65536,D%16,P%16 T32D64P128 8 7 0 ptr | LM head: the weighted operand from registers
weighted_sum:flat sm_80 16-bit T<=63,D%16,P%16 T32D64P128 8 7 0 ptr | the weighted operand from registers
weighted_sum:flat sm_80 16-bit T<=63,P<=64 T32D64P64 8 2 0 ptr | element by element
weighted_sum:flat sm_80 16-bit T<=63 T32D64P128 8 3 0 ptr | element by element, 4096 elements of the larger operand
weighted_sum sm_80 16-bit D<=64,P<=64,D%16,P%16 T32D64P64 4 7 0 ptr | a sample's sum and the total in registers
weighted_sum sm_80 16-bit D<=16,D%16,P%16 T32D16P128 4 7 0 ptr | D in 16 columns
weighted_sum sm_80 16-bit D<=64,D%16,P%16 T32D64P128 4 7 0 ptr | a sample's sum and the total in registers
weighted_sum sm_80 16-bit P<=64,D%16,P%16 T32D128P64 4 7 0 ptr | a sample's sum and the total in registers
weighted_sum sm_80 16-bit P>=65536,D%16,P%16 T64D128P128 8 7 0 ptr | LM head: as the general row
weighted_sum sm_80 16-bit D%16,P%16 T64D128P128 8 7 0 ptr | a sample's sum and the total in registers, 96 KiB of stages
weighted_sum sm_80 16-bit P<=64 T32D64P64 8 2 0 ptr | element by element
weighted_sum sm_80 16-bit * T32D64P128 8 3 0 ptr | element by element, 4096 elements of the larger operand
# weighted_sum sm_90
weighted_sum:flat sm_90 16-bit T<=63,D<=64,P<=64,D%16,P%16 T32D64P64 4 7 0 ptr | the weighted operand from registers
weighted_sum:flat sm_90 16-bit T<=63,D<=16,D%16,P%16 T32D16P128 4 7 0 ptr | D in 16 columns
weighted_sum:flat sm_90 16-bit T<=63,D<=64,D%16,P%16 T32D64P128 4 7 0 ptr | the weighted operand from registers
weighted_sum:flat sm_90 16-bit T<=63,P<=64,D%16,P%16 T32D128P64 4 7 0 ptr | the weighted operand from registers
weighted_sum:flat sm_90 16-bit T<=63,P>=65536,D%16,P%16 T32D128P128 8 7 0 ptr | LM head: the weighted operand from registers
weighted_sum:flat sm_90 16-bit T<=63,D%16,P%16 T32D128P128 8 7 0 ptr | the weighted operand from registers
weighted_sum:flat sm_90 16-bit T<=63,P<=64 T32D64P64 8 2 0 ptr | element by element
weighted_sum:flat sm_90 16-bit T<=63 T32D64P128 8 3 0 ptr | element by element, 4096 elements of the larger operand
weighted_sum sm_90 16-bit D<=64,P<=64,D%16,P%16 T64D64P64 4 7 0 tma | a sample's sum and the total in registers
weighted_sum sm_90 16-bit D<=16,D%16,P%16 T64D16P128 4 7 0 tma | D in 16 columns
weighted_sum sm_90 16-bit D<=64,D%16,P%16 T64D64P128 4 7 0 tma | a sample's sum and the total in registers
weighted_sum sm_90 16-bit P<=64,D%16,P%16 T64D128P64 4 7 0 tma | a sample's sum and the total in registers
weighted_sum sm_90 16-bit P>=65536,D%16,P%16 T64D256P128 8 5 0 tma | LM head; measured on an H200, 2026-11-26: Llama-3.2-1B head 2.05 ms, 2.53 at 128×128
weighted_sum sm_90 16-bit D%16,P%16 T64D256P128 8 5 0 tma | measured on an H200, 2026-11-26: Llama-3.2-1B up 0.442 ms, 0.535 at 128×128, though some registers spill
weighted_sum sm_90 16-bit P<=64 T64D64P64 8 2 0 tma | element by element; measured on an H200, 2026-11-26: ResNet stem 0.292 ms, 0.430 at 32 positions
weighted_sum sm_90 16-bit * T32D64P128 4 5 0 tma | element by element; measured on an H200, 2026-11-26: LoRA B 0.0776 ms, 0.130 in three stages
# weighted_sum sm_100
weighted_sum:flat sm_100 16-bit T<=63,D<=64,P<=64,D%16,P%16 T32D64P64 4 5 0 ptr | the weighted operand from registers
weighted_sum:flat sm_100 16-bit T<=63,D<=16,D%16,P%16 T32D16P128 4 5 0 ptr | D in 16 columns
weighted_sum:flat sm_100 16-bit T<=63,D<=64,D%16,P%16 T32D64P128 4 5 0 ptr | the weighted operand from registers
weighted_sum:flat sm_100 16-bit T<=63,P<=64,D%16,P%16 T32D128P64 4 3 0 ptr | the weighted operand from registers
weighted_sum:flat sm_100 16-bit T<=63,P>=65536,D%16,P%16 T32D128P128 8 5 0 ptr | LM head: the weighted operand from registers
weighted_sum:flat sm_100 16-bit T<=63,D%16,P%16 T32D128P128 8 5 0 ptr | the weighted operand from registers
weighted_sum:flat sm_100 16-bit T<=63,P<=64 T32D64P64 8 2 0 ptr | element by element
weighted_sum:flat sm_100 16-bit T<=63 T32D64P128 8 3 0 ptr | element by element, 4096 elements of the larger operand
weighted_sum sm_100 16-bit D<=64,P<=64,D%16,P%16 T64D64P64 4 7 0 tma | a sample's sum and the total in registers
weighted_sum sm_100 16-bit D<=16,D%16,P%16 T64D16P128 4 7 0 tma | D in 16 columns
weighted_sum sm_100 16-bit D<=64,D%16,P%16 T64D64P128 4 7 0 tma | a sample's sum and the total in registers
weighted_sum sm_100 16-bit P<=64,D%16,P%16 T64D128P64 4 7 0 tma | a sample's sum and the total in registers
weighted_sum sm_100 16-bit P>=65536,D%16,P%16 T64D128P128 8 7 0 tma | LM head: a sample's sum and the total in registers
weighted_sum sm_100 16-bit D%16,P%16 T64D128P128 8 7 0 tma | a sample's sum and the total in registers
weighted_sum sm_100 16-bit P<=64 T32D64P64 8 2 0 tma | element by element
weighted_sum sm_100 16-bit * T32D64P128 8 3 0 tma | element by element, 4096 elements of the larger operand
# weighted_sum gfx942
weighted_sum:flat gfx942 16-bit T<=63,D<=64,P<=64,D%16,P%16 T32D64P64 4 2 0 ptr | the weighted operand from registers
weighted_sum:flat gfx942 16-bit T<=63,D<=16,D%16,P%16 T32D16P128 4 2 0 ptr | D in 16 columns
weighted_sum:flat gfx942 16-bit T<=63,D<=64,D%16,P%16 T32D64P128 4 2 0 ptr | the weighted operand from registers
weighted_sum:flat gfx942 16-bit T<=63,P<=64,D%16,P%16 T32D128P64 4 2 0 ptr | the weighted operand from registers
weighted_sum:flat gfx942 16-bit T<=63,P>=65536,D%16,P%16 T32D128P128 8 2 0 ptr | LM head: the weighted operand from registers
weighted_sum:flat gfx942 16-bit T<=63,D%16,P%16 T32D128P128 8 2 0 ptr | the weighted operand from registers
weighted_sum:flat gfx942 16-bit T<=63,P<=64 T32D64P64 8 2 0 ptr | element by element
weighted_sum:flat gfx942 16-bit T<=63 T32D64P128 8 2 0 ptr | element by element, 4096 elements of the larger operand
weighted_sum gfx942 16-bit D<=64,P<=64,D%16,P%16 T64D64P64 4 2 0 ptr | a sample's sum and the total in registers
weighted_sum gfx942 16-bit D<=16,D%16,P%16 T64D16P128 4 2 0 ptr | D in 16 columns
weighted_sum gfx942 16-bit D<=64,D%16,P%16 T64D64P128 4 2 0 ptr | a sample's sum and the total in registers
weighted_sum gfx942 16-bit P<=64,D%16,P%16 T64D128P64 4 2 0 ptr | a sample's sum and the total in registers
weighted_sum gfx942 16-bit P>=65536,D%16,P%16 T64D128P128 8 2 0 ptr | LM head: a sample's sum and the total in registers
weighted_sum gfx942 16-bit D%16,P%16 T64D128P128 8 2 0 ptr | a sample's sum and the total in registers
weighted_sum gfx942 16-bit P<=64 T32D64P64 8 2 0 ptr | element by element
weighted_sum gfx942 16-bit * T32D64P128 8 2 0 ptr | element by element, 4096 elements of the larger operand
# weighted_sum fp32
weighted_sum:flat sm_80,sm_90,sm_100 fp32 T<=63,D<=16 T16D16P64 4 5 0 ptr | D in 16 columns
weighted_sum:flat gfx942 fp32 T<=63,D<=16 T16D16P64 4 3 0 ptr | D in 16 columns
weighted_sum:flat sm_80,sm_90 fp32 T<=63,P>=65536 T16D64P64 8 5 0 ptr | LM head: as the general row
weighted_sum:flat sm_80,sm_90 fp32 T<=63 T16D64P64 8 5 0 ptr | IEEE multiply-adds, 16 accumulators a thread
weighted_sum:flat sm_100 fp32 T<=63,P>=65536 T16D64P64 4 5 0 ptr | LM head: as the general row
weighted_sum:flat sm_100 fp32 T<=63 T16D64P64 4 5 0 ptr | IEEE multiply-adds, 32 accumulators a thread; 8 warps spilled
weighted_sum:flat gfx942 fp32 T<=63,P>=65536 T16D64P64 8 3 0 ptr | LM head: as the general row
weighted_sum:flat gfx942 fp32 T<=63 T16D64P64 8 3 0 ptr | IEEE multiply-adds, 16 accumulators a thread
weighted_sum sm_80,gfx942 fp32 D<=16 T16D16P64 4 3 0 ptr | D in 16 columns
weighted_sum sm_80,gfx942 fp32 P>=65536 T16D64P64 8 3 0 ptr | LM head: as the general row
weighted_sum sm_80,gfx942 fp32 * T16D64P64 8 3 0 ptr | IEEE multiply-adds, 16 or twice 16 accumulators a thread
weighted_sum sm_90,sm_100 fp32 D<=16 T16D16P64 4 3 0 tma | D in 16 columns
weighted_sum sm_90 fp32 P>=65536 T16D64P64 4 7 0 ptr | LM head: as the general row
weighted_sum sm_100 fp32 P>=65536 T16D64P64 8 7 0 tma | LM head: as the general row
weighted_sum sm_90 fp32 * T16D64P64 4 7 0 ptr | measured on an H200, 2026-11-26: GPT-2 up 1.21 ms, 2.12 with 8 warps and descriptors
weighted_sum sm_100 fp32 * T16D64P64 8 7 0 tma | IEEE multiply-adds; loads wait for factors, so of seven stages three hold rows, and of three one did
# interpreter
outer_product interpreter 16-bit * T32D64P64 4 1 256 tma | interpreter
outer_product interpreter fp32 * T32D64P64 4 1 256 ptr | interpreter
outer_norm interpreter 16-bit * T32D64P64 4 1 256 tma | interpreter
outer_norm interpreter fp32 * T32D64P64 4 1 256 ptr | interpreter
gram_norm interpreter 16-bit * T32K64 4 1 0 tma | interpreter
gram_norm interpreter fp32 * T32K64 4 1 0 ptr | interpreter
weighted_sum:flat interpreter 16-bit T<=63 T32D64P64 4 1 0 ptr | interpreter
weighted_sum interpreter 16-bit * T32D64P64 4 1 0 tma | interpreter
weighted_sum:flat interpreter fp32 T<=63 T32D64P64 4 1 0 ptr | interpreter
weighted_sum interpreter fp32 * T32D64P64 4 1 0 ptr | interpreter
"""  # noqa: E501 (a row is a line)
