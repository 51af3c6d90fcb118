/* dependent_launch.cuh: programmatic dependent launch of sm_90: the blocks of a kernel that was
 * launched for it may start before the kernel ahead of it in the stream has ended. */
#ifndef FKDA_PTX_DEPENDENT_LAUNCH_CUH
#define FKDA_PTX_DEPENDENT_LAUNCH_CUH

/* Waits until the kernels ahead have ended and what they wrote is visible. */
static __device__ __forceinline__ void griddepcontrol_wait(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* The next kernel may start once every block has come here or ended. */
static __device__ __forceinline__ void griddepcontrol_launch_dependents(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#endif
