"""The name under which MoonshotAI's package exposes its extension; the same calls as flash_kda."""

from flash_kda import _fwd_raw as fwd
from flash_kda import get_workspace_size

__all__ = ["fwd", "get_workspace_size"]
