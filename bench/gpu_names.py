"""Names of the GPU benchmark's cases, in the order they run: the report needs them without torch.

"8192x96" is T x H; "8x1024x96" is N sequences x T x H; "mixed x96" has six unequal sequences, 8192
tokens in all. Decode: "N256xH32 fp32" is N sequences of a token, H heads, the dtype of the states;
"T4 drafts": four draft tokens each, every state kept.
"""

# The geometric mean over these is one figure for few heads and short prompts.
TEN_SHAPES = (
    "2048x12 2048x16 4096x8 4096x12 4x2048x12 8192x16 1024x4 3072x10 8192x24 8x2048x16".split()
)
NAMES = ["8192x96", "mixed x96", "8x1024x96", "8192x64", "mixed x64", "8x1024x64"]
NAMES += "8192x32 8192x16 8192x12 8192x8 8192x4 2048x12 512x32 128x12".split()
NAMES += "32x256x32 128x64x32 8x16384x16 65536x12 262144x8".split()
NAMES += [name for name in TEN_SHAPES if name not in NAMES]

DECODE_NAMES = "N256xH32 fp32|N256xH96 fp32|N128xH32 fp32|N32xH32 fp32|N1xH32 fp32|N1xH96 fp32"
DECODE_NAMES += "|N256xH32 bf16|N128xH32 bf16|N1xH32 bf16|N64xH32xT4 drafts fp32"
DECODE_NAMES = DECODE_NAMES.split("|")
