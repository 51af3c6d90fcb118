// header.cpp: the public header in C++: it compiles with all warnings, and its names link.
#include <flash_kda.h>

#include <cstdio>

int main()
{
    fkda_args args;
    fkda_args_init(&args);
    args.flags = FKDA_QK_L2NORM | FKDA_BETA_SIGMOID;
    args.gate = FKDA_GATE_SOFTPLUS;
    args.isa = FKDA_ISA_PORTABLE;
    const int64_t shape[] = {1, 2};
    args.A_log = fkda_tensor_contiguous(nullptr, FKDA_F32, 2, shape);
    char reason[FKDA_REASON_BYTES];
    if (fkda_forward(&args, reason, sizeof reason) != FKDA_ERROR_INVALID_ARGUMENT)
        return 1;
    std::puts(fkda_version());
    return 0;
}
