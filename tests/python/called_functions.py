"""Which functions a call of Python comes down to: what its time on the host is made of, counted."""

import sys

import flash_kda


def called_functions(function):
    """module.name of the Python functions that function() calls and of the built-in ones that those
    call, in order. What C code calls shows too where it is written in Python."""
    names = []

    def note(frame, event, argument):
        if event == "call":
            names.append(f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}")
        elif event == "c_call" and argument is not sys.setprofile:
            names.append(f"{argument.__module__}.{argument.__name__}")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return names


def one_call(name):
    """What flash_kda.<name> comes down to on plain tensors: itself, the question whether torch is
    compiling, and one function of the extension."""
    asks = called_functions(flash_kda._is_compiling)
    return [f"flash_kda.{name}", *asks, f"flash_kda._C.{name}"]
