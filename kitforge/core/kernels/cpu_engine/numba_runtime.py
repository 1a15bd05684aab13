"""numba: compilation of loops, intrinsics for them, and a thread pool. Imported only where numba is installed.

No other file names what numba and llvmlite do not promise to keep; docs/compatibility.md has the versions tested.
"""

import fcntl
import functools
import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar, cast

import numpy as np
from llvmlite import binding, ir
from numba import extending, njit, types
from numba.core import cgutils, config
from numba.core.bytecode import FunctionIdentity
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.core.codegen import JITCodeLibrary, get_host_cpu_features
from numba.core.compiler import Compiler, compile_result
from numba.core.compiler_lock import global_compiler_lock
from numba.np.numpy_support import carray

from kitforge.core.kernels.cpu_engine.threads import num_threads
from kitforge.foundation.log import errors

# LLVM may write a function as it is for one constant argument in place of the general one. The process that compiles it
# runs the general one of another library; those that load the caller from the cache run the other for all arguments.
if binding.llvm_version_info[0] >= 20:
    binding.set_option("", "-funcspec-max-iters=0")


def _number_functions() -> None:
    """numba tells functions of one name and signature, such as the operators of vectors, by a number that every process
    counts from 1: linked together, what one process has saved would be taken for what another has."""
    cast(Any, FunctionIdentity)._unique_ids = itertools.count(int.from_bytes(os.urandom(7), "big"))


_number_functions()
os.register_at_fork(after_in_child=_number_functions)

# Of the processor, as numba is told or finds them.
FEATURES = str(cast(Any, config).CPU_FEATURES or cast(Any, get_host_cpu_features)()).split(",")
# numba.core.cgutils, which has no types.
lowering: Any = cgutils

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function, fastmath: bool | set[str] = False) -> Function:
    """The function compiled at its first call; it releases the GIL.

    Products and sums are neither fused nor reordered, so a loop has the bits of its reference. Machine code is cached
    beside the source, like Python's bytecode; without a writable folder each process compiles it again. The cache of a
    caller does not notice a changed callee of another file.
    """
    made = _dispatcher(FunctionCache, function, fastmath=fastmath)
    # Calls from Python and from C need wrappers, which take a third of the time of compilation; those of compiled loops
    # need none.
    inner = functools.cache(lambda: _dispatcher(_InnerCache, function, fastmath=fastmath, **_INNER))
    made.get_call_template = lambda *types: inner().get_call_template(*types)
    made.get_overload = lambda signature: inner().get_overload(signature)
    return cast(Function, made)


def _dispatcher(kind: Callable[..., Any], function: Callable[..., Any], **options: Any) -> Any:
    """numba's, with that cache of machine code where there is a writable folder."""
    make: Any = njit(nogil=True, error_model="numpy", **options)
    made = make(function)
    with suppress(RuntimeError):
        made._cache = kind(function)
        made._cache.load_overload = functools.partial(_loaded, made._cache.load_overload)
        made.compile = functools.partial(_compile_once, made.compile, made._cache)
    return made


def _loaded(load: Callable[..., Any], *wanted: Any) -> Any:
    """What the cache holds; None of what is compiled now."""
    found = load(*wanted)
    if found is None:
        _say_once()
    return found


@functools.cache
def _say_once() -> None:
    errors.print("compiling loops for this processor, once (up to a minute)", soft_wrap=True)


class _InnerLibrary(JITCodeLibrary):
    """A function as LLVM's assembly, for its callers. numba would optimize it and write its machine code for itself and
    once more in each caller: two thirds of the time of compilation."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self: Any) -> None:
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = True

    def get_pointer_to_function(self, _name: str) -> int:
        """None of what has no machine code."""
        return 0

    @property
    def codegen(self) -> Any:
        """For `set_env`: there is no address to set."""
        return self

    def set_env(self, *_environment: Any) -> None:
        pass

    def serialize_using_object_code(self: Any) -> Any:
        return self.serialize_using_bitcode()


# Classes of numba's, which has no types.
_make_library, _make_result = cast(Any, _InnerLibrary), cast(Any, compile_result)


class _InnerCompiler(Compiler):
    def __init__(self, typing_context: Any, context: Any, _library: Any, *given: Any) -> None:
        cast(Any, super()).__init__(typing_context, context, _make_library(context.codegen(), "inner"), *given)


class _InnerFiles(CompileResultCacheImpl):
    def get_filename_base(self, *names: str) -> str:
        """Of other files than those of the function with its wrappers."""
        return f"assembly.{cast(Any, super()).get_filename_base(*names)}"

    def rebuild(self, target_context: Any, payload: Any) -> Any:
        """What `CompileResult._reduce` has written, in a library of this kind."""
        (name, _, code), fndesc, environment, signature, _, _, _, reload_init, referenced_envs = payload
        library = _make_library(target_context.codegen(), name)
        library._final_module = binding.parse_bitcode(code)
        library._finalize_final_module()
        return _make_result(
            typing_context=target_context.typing_context,
            target_context=target_context,
            entry_point=target_context.get_executable(library, fndesc, environment),
            library=library,
            environment=environment,
            fndesc=fndesc,
            signature=signature,
            objectmode=False,
            lifted=(),
            reload_init=reload_init,
            referenced_envs=referenced_envs,
        )


class _InnerCache(FunctionCache):
    _impl_class = _InnerFiles


_INNER = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "pipeline_class": _InnerCompiler}


def compiled_fastmath(function: Function) -> Function:
    """The same with sums that may be reordered, so that LLVM vectorizes them. NaN and infinity stay visible."""
    return compiled(function, {"reassoc", "contract", "nsz", "arcp"})


def _compile_once(compile: Callable[[Any], Any], cache: Any, signature: Any) -> Any:
    """Load or compile the function behind a file lock: of several processes, such as ranks that have just started, one
    compiles and the others load what it has saved.

    Without it, numba 0.68 may also give two signatures that two processes compile at once the same file (it reads,
    extends and writes the index without a lock), and calls one for the other from then on.
    """
    # A function that is being compiled asks for those that it calls, so the lock between threads comes first.
    with global_compiler_lock, open(os.path.join(cache.cache_path, f"{cache._impl.filename_base}.lock"), "w") as file:
        # A lock of the process, which one that is forked meanwhile does not hold. Closing the file releases it.
        fcntl.lockf(file, fcntl.LOCK_EX)
        return compile(signature)


intrinsic: Callable[[Callable[..., Any]], Any] = extending.intrinsic


@intrinsic
def _pointer_to(_context: Any, _address: Any, like: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    to_kind: Any = types.CPointer
    return to_kind(like)(types.intp, like), generate


# Element types of arrays at an address: fp32, or bfloat16 as uint16 (see `widened`).
FLOAT: Any = np.float32(0)
HALF: Any = np.uint16(0)


@compiled
def array_at(address: int, shape: Any, like: Any) -> Any:
    """In a compiled loop, the array at an address, with the element type of `like`. Passing an address takes a tenth of
    the time of passing an array."""
    return carray(_pointer_to(address, like), shape)


@compiled
def float32_at(address: int, shape: Any) -> Any:
    """The same for fp32."""
    return array_at(address, shape, np.float32(0))


@compiled
def int64_at(address: int, shape: Any) -> Any:
    """The same for int64."""
    return array_at(address, shape, np.int64(0))


def _like(value: Any, kind: Any) -> Any:
    """That type, or a vector of as many as the value has."""
    return ir.VectorType(kind, value.type.count) if isinstance(value.type, ir.VectorType) else kind


def _constant(value: Any, kind: Any, number: int) -> Any:
    wide = _like(value, kind)
    return ir.Constant(wide, number if wide is kind else [number] * wide.count)


def widened_bits(builder: Any, short: Any) -> Any:
    """LLVM's fp32 of a bfloat16 (as int16), or of a vector of them."""
    wide = ir.IntType(32)
    bits = builder.shl(builder.zext(short, _like(short, wide)), _constant(short, wide, 16))
    return builder.bitcast(bits, _like(short, ir.FloatType()))


def narrowed_bits(builder: Any, number: Any) -> Any:
    """LLVM's bfloat16 (as int16) nearest to an fp32 number, or to a vector of them; of two, the even one."""
    wide, short = ir.IntType(32), ir.IntType(16)
    bits, upper = builder.bitcast(number, _like(number, wide)), _constant(number, wide, 16)
    to_even = builder.and_(builder.lshr(bits, upper), _constant(number, wide, 1))
    half = builder.add(bits, builder.add(to_even, _constant(number, wide, 0x7FFF)))
    rounded = builder.trunc(builder.lshr(half, upper), _like(number, short))
    return builder.select(builder.fcmp_unordered("uno", number, number), _constant(number, short, 0x7FC0), rounded)


@intrinsic
def widened(_context: Any, number: Any) -> Any:
    """In a compiled loop, `widened(number)` is the fp32 value of a bfloat16 (as uint16), or of fp32 itself."""

    def generate(_context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if signature.args[0] == types.float32:
            return arguments[0]
        return widened_bits(builder, arguments[0])

    return types.float32(number), generate


@intrinsic
def narrowed(_context: Any, _number: Any, like: Any) -> Any:
    """In a compiled loop, `narrowed(number, like)` rounds fp32 to the type of `like`: fp32 or bfloat16."""

    def generate(_context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if signature.args[1] == types.float32:
            return arguments[0]
        return narrowed_bits(builder, arguments[0])

    return (types.float32 if like == types.float32 else types.uint16)(types.float32, like), generate


@intrinsic
def truncated(_context: Any, _number: Any, like: Any) -> Any:
    """In a compiled loop, `truncated(number, like)` is `narrowed` for numbers that the type of `like` holds exactly."""

    def generate(_context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if signature.args[1] == types.float32:
            return arguments[0]
        wide, short = ir.IntType(32), ir.IntType(16)
        return builder.trunc(builder.lshr(builder.bitcast(arguments[0], wide), wide(16)), short)

    return (types.float32 if like == types.float32 else types.uint16)(types.float32, like), generate


@compiled_fastmath
def rounded(number: Any, like: Any) -> Any:
    """In a compiled loop, the fp32 number rounded to the precision of `like`."""
    return widened(narrowed(number, like))


@intrinsic
def prefetch(_context: Any, array: Any, _row: Any, _column: Any) -> Any:
    """In a compiled loop, `prefetch(array, row, column)` prefetches the cache line of that element."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = signature.args[0]
        made = context.make_array(kind)(context, builder, arguments[0])
        address = lowering.get_item_pointer(context, builder, kind, made, list(arguments[1:]))
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        function_type = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        function = lowering.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0i8")
        # Read access, all cache levels, data.
        how = [ir.Constant(number, each) for each in (0, 3, 1)]
        builder.call(function, [builder.bitcast(address, pointer), *how])
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp), generate


@compiled
def prefetch_row(rows: Any, row: int, width: int) -> None:
    """In a compiled loop, prefetch the first `width` elements of a row."""
    for column in range(0, width, 16):
        prefetch(rows, row, column)
    prefetch(rows, row, width - 1)


@compiled
def hash_bits(key: Any) -> Any:
    """In a compiled loop, the finalizer of MurmurHash3 (Appleby) of an int64."""
    bits = np.uint64(key)
    bits = (bits ^ (bits >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    bits = (bits ^ (bits >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return bits ^ (bits >> np.uint64(33))


def parallel_for(work: Callable[[int, int], Any], count: int, grain: int) -> list[Any]:
    """The results of `work(start, stop)` for chunks of range(count), in order: one chunk a thread, none below `grain`.

    Uses as many threads as torch, fewer while another thread has reserved some. The bits of a result must not depend
    on the chunks. numba's own thread pool is not used: its portable layer crashes under concurrent callers, which a
    prefetcher makes.
    """
    num_chunks = count // max(grain, 1)
    if num_chunks < 2 or (num_chunks := min(num_threads(), num_chunks)) == 1:
        return [work(0, count)]
    bounds = [count * chunk // num_chunks for chunk in range(num_chunks + 1)]
    # A forked process has none of the threads of its parent.
    pool = _pool(os.getpid(), num_chunks - 1)
    chunks = list(zip(bounds[1:-1], bounds[2:], strict=True))
    futures = [pool.submit(work, *chunk) for chunk in chunks]
    results = [work(*bounds[:2])]
    # Chunks that no thread has begun, because other callers keep the pool busy, run here.
    for chunk, other in zip(chunks, futures, strict=True):
        results.append(work(*chunk) if other.cancel() else other.result())
    return results


def run_on_threads(work: Callable[[], Any], count: int) -> None:
    """Call `work` on this thread and on others, `count` in all, as far as they are free. They share the work through a
    counter, so a late one may find none left."""
    calls = [_Call(work) for _ in range(count - 1)]
    if calls:
        queue = _helpers(os.getpid(), len(calls))
        for call in calls:
            queue.put(call)
    work()
    for call in calls:
        call.join()


class _Call:
    """A call for another thread. A future does the same in several times as long, which is much of a short call."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._begun, self._finished = threading.Lock(), threading.Lock()
        self._finished.acquire()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Call it, unless it has been joined before it began."""
        if not self._begun.acquire(blocking=False):
            return
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 (raised by the thread that joins)
            self._error = error
        self._finished.release()

    def join(self) -> None:
        """Wait until it has finished, or keep it from beginning."""
        if self._begun.acquire(blocking=False):
            return
        self._finished.acquire()
        if self._error is not None:
            raise self._error


def _serve(queue: SimpleQueue[_Call]) -> None:
    while True:
        queue.get().run()


@functools.cache
def _helpers(_process: int, num_threads: int) -> SimpleQueue[_Call]:
    """The queue of so many threads. A forked process has none of the threads of its parent."""
    queue: SimpleQueue[_Call] = SimpleQueue()
    for _ in range(num_threads):
        threading.Thread(target=_serve, args=(queue,), name="kernel", daemon=True).start()
    return queue


@functools.cache
def _pool(_process: int, num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="kernel")
