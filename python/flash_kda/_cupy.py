"""What the extension asks about CUDA arrays whose type has no exchange table and is not torch's.

CuPy's are the ones it knows. Any other is refused: without its library's stream a kernel could
overtake the work that fills its inputs.
"""


def _import_cupy(array):
    """The module cupy where the array is one of its own; NotImplementedError for any other."""
    for base in type(array).__mro__:
        if base.__module__.partition(".")[0] == "cupy":
            import cupy

            return cupy
    raise NotImplementedError(
        f"a {type(array)} on CUDA, whose library's current stream is not known, wanted arrays of "
        "torch or cupy"
    )


def current_stream(array, device):
    """The stream that CuPy would queue its own work on."""
    cupy = _import_cupy(array)
    with cupy.cuda.Device(device):
        return cupy.cuda.get_current_stream().ptr


def empty_bytes(array, count):
    """Memory for the time of a call, from CuPy's pool in the order of its current stream."""
    cupy = _import_cupy(array)
    with cupy.cuda.Device(array.__dlpack_device__()[1]):
        return cupy.empty(count, dtype="uint8")
