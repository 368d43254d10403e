"""Tiles that the search measures before any neighbours, in the format of `kernels/_tile_rows.py`.

For sm_90. What stands in the place of a source is what the time will tell. Each compiles; registers, spills and shared
memory were counted ahead of time (Triton 3.6), all else is to be measured. A weighted sum's loads wait for its factors,
so of n stages about n / 2 hold rows.
"""

IDEAS = """
outer_norm,outer_product 16-bit T128D128P128 8 3 tma | a step is a chain: tensor cores are waited for half as often
outer_norm,outer_product 16-bit T128D128P128 8 2 tma | the same in two stages
outer_norm,outer_product 16-bit T64D64P128 4 3 tma | three programs a multiprocessor hide each other's start and end
outer_norm,outer_product 16-bit T64D128P64 4 3 tma | the same, the thin side at D's or P's end of the L2 cache
outer_norm,outer_product 16-bit T128D128P64 4 2 tma | both: a step is a chain, two programs
outer_norm,outer_product 16-bit T64D128P256 8 3 tma | 85 FLOP a byte; 78 spills: is it the L2 cache's bandwidth?
outer_norm,outer_product 16-bit T64D256P128 8 3 tma | the same, four instructions of 64 by 256
outer_norm,outer_product 16-bit T64D256P128 16 3 tma | the same in four warpgroups; 69 spills
outer_norm,outer_product 16-bit T64D128P128 8 6 tma | more loads in flight
outer_norm,outer_product 16-bit T64D128P128 8 3 tma | fewer
outer_norm,outer_product 16-bit T32D128P128 8 6 tma | shorter steps: an earlier start
outer_norm,outer_product 16-bit T64D128P128 8 4 ptr | what descriptors save
weighted_sum 16-bit T128D128P128 8 5 tma | longer steps, three of them in flight
weighted_sum 16-bit T128D128P128 8 2 tma | longer steps, two of them in flight
weighted_sum 16-bit T64D128P64 4 5 tma | three programs a multiprocessor
weighted_sum 16-bit T64D64P128 4 5 tma | the same, the other way
weighted_sum 16-bit T64D128P256 8 5 tma | 85 FLOP a byte; 94 spills: is it the L2 cache's bandwidth?
weighted_sum 16-bit T64D256P128 8 5 tma | the same, instructions of 64 by 256; 58 spills
weighted_sum 16-bit T64D256P128 16 5 tma | the same in four warpgroups
weighted_sum 16-bit T64D128P128 8 11 tma | more loads in flight
weighted_sum 16-bit T64D128P128 8 5 tma | fewer
gram_norm 16-bit T128K128 8 3 tma | a third stage in flight
gram_norm 16-bit T64K128 4 3 tma | four times the programs: 36 pairs a sample leave a third of the last wave idle
gram_norm 16-bit T64K128 4 2 tma | the same, three programs a multiprocessor
gram_norm 16-bit T64K64 4 4 tma | the same, shorter steps
gram_norm 16-bit T64K128 8 3 tma | the same, eight warps
gram_norm 16-bit T128K128 16 2 tma | four warpgroups: 32 registers an accumulator
gram_norm 16-bit T128K64 8 4 tma | shorter steps; 43 spills
gram_norm 16-bit T128K128 8 2 ptr | what descriptors save
gram_norm fp32 T64K16 4 3 ptr | 8 by 4 entries a thread: fewer loads from shared memory a product
gram_norm fp32 T64K16 8 4 ptr | a step more in flight
gram_norm fp32 T64K32 8 3 ptr | longer steps
gram_norm fp32 T64K32 4 3 ptr | both
gram_norm fp32 T32K32 4 3 ptr | small tiles, more programs
gram_norm fp32 T128K16 8 3 ptr | 8 by 8 entries a thread; spills
weighted_sum fp32 T16D64P64 4 7 tma | 8 by 4 entries a thread, two programs a multiprocessor
weighted_sum fp32 T16D64P64 8 3 tma | one step in flight
weighted_sum fp32 T16D64P64 8 5 tma | two
weighted_sum fp32 T16D64P64 8 9 tma | four
weighted_sum fp32 T16D64P64 8 7 ptr | what descriptors cost: direct norms have 128 registers with them, 80 without
weighted_sum fp32 T16D128P64 8 7 tma | 8 by 4 entries a thread, one program
weighted_sum fp32 T16D64P128 8 7 tma | the same, the other way
outer_norm,outer_product fp32 T16D64P64 4 3 tma | 8 by 4 entries a thread, two programs a multiprocessor
outer_norm,outer_product fp32 T16D64P64 4 4 tma | the same, a step more in flight
outer_norm,outer_product fp32 T16D128P64 8 3 tma | 8 by 4 entries a thread, one program
outer_norm,outer_product fp32 T16D64P128 8 3 tma | the same, the other way
outer_norm,outer_product fp32 T16D64P64 8 4 tma | a step more in flight
outer_norm,outer_product fp32 T16D64P64 8 3 ptr | what descriptors cost or save
"""
