/* select.cuh: a choice of two values that the compiler may not turn into a branch. */
#ifndef FKDA_PTX_SELECT_CUH
#define FKDA_PTX_SELECT_CUH

static __device__ __forceinline__ float select_f32(int condition, float yes, float no)
{
    float x;
    asm("{\n\t.reg .pred p;\n\tsetp.ne.s32 p, %1, 0;\n\tselp.f32 %0, %2, %3, p;\n\t}"
        : "=f"(x)
        : "r"(condition), "f"(yes), "f"(no));
    return x;
}

#endif
