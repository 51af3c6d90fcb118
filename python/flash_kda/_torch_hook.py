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


class _Waiter:
    """Finds nothing: calls `function` at the first import after module `name` is complete."""

    def __init__(self, name, function):
        self.name = name
        self.function = function

    def find_spec(self, name, path=None, target=None):
        if self in sys.meta_path and not _initializing(self.name):
            sys.meta_path.remove(self)
            if self.name in sys.modules:  # its import may have failed
                self.function()
        return None


def _initializing(name):
    return getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False)


def call_after_import(name, function):
    """Calls function() now if module `name` is imported, else once it has been.

    A module whose import is under way (it imports us, directly or not) counts as imported when the
    next import statement runs after it is complete.
    """
    if name not in sys.modules:
        sys.meta_path.insert(0, _Finder(name, function))
    elif _initializing(name):
        sys.meta_path.insert(0, _Waiter(name, function))
    else:
        function()
