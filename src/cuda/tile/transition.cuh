/* transition.cuh: the order of an image of M, which pass 1 of a split forward writes and combine
 * reads: pieces of two rows and two columns,
 *
 *     [row pair][column pair, permuted]{ row 0, columns 0, 1; row 1, columns 0, 1 }
 *
 * which are registers of a product as they lie there.
 */
#ifndef FKDA_TILE_TRANSITION_CUH
#define FKDA_TILE_TRANSITION_CUH

#include "cuda/tile_image.h"

/* Place of an item in the image. Of the combine step's lanes, eight at a time load two pieces of
 * each of four row pairs: the permutation keeps them apart in the banks. Pass 1 stores the four
 * pieces of eight columns of a row pair at once: they stay together. */
static __device__ __forceinline__ int transition_offset(int row, int column)
{
    return row / 2 * (2 * TILE_K) + 4 * (column / 2 ^ row / 4 % 4 * 2) + row % 2 * 2 + column % 2;
}

#endif
