"""Calls a function once a module is imported, now or later, without importing it.

The operator torch.ops.flash_kda.fwd can be registered only when torch is there, importing
flash_kda must not import torch, and either may come first. So when torch is not loaded yet, a
finder waits in front of sys.meta_path for its import and takes itself away afterwards.
"""

import sys


class _Finder:
    """Finds nothing itself: lets the others find `name`, and hangs `function` on its loading."""

    def __init__(self, name, function):
        self.name = name
        self.function = function

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        for finder in sys.meta_path:
            find_spec = None if finder is self else getattr(finder, "find_spec", None)
            spec = find_spec and find_spec(name, path, target)
            if spec:
                self._follow(spec.loader)
                return spec
        return None

    def _follow(self, loader):
        exec_module = getattr(loader, "exec_module", None)
        if exec_module is None:
            return

        def exec_module_then_call(module):
            exec_module(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self.function()

        loader.exec_module = exec_module_then_call


def call_after_import(name, function):
    """Calls function() now if module `name` is imported, else right after it has been."""
    module = sys.modules.get(name)
    initializing = getattr(getattr(module, "__spec__", None), "_initializing", False)
    if module is None:
        sys.meta_path.insert(0, _Finder(name, function))
    elif not initializing:
        function()
