"""The CPU part of docs/benchmarks.md."""

import report_pictures
from report_text import Runs, best_ms, milliseconds, percent, scientific, size_of, slug, table

EXPLANATION = """\
* **best** is the least processor time of a call with one thread, and the fastest call on the wall
  with several; **median**, p10 and p90 are of the wall. Shares and rates are of the best, as the
  ceilings are: whatever else a machine does only makes them worse. Where the median is far above
  the best, other programs were running; the load averages at the end say how many. Then one thread
  is measured soundly, but several threads, and their ceilings, only had what was left.
* **of FMA** is the useful work, 98.3 kFLOP a token and head, as a share of the peak of the kernel
  set's fp32 multiply-add units on as many threads, measured in the same run. Work that a kernel
  does beyond the useful (norms, gates, exponentials, the solve inside a chunk) counts against it.
  Kernels with bf16 products may pass 100 %: their units are faster.
* **of copy** is the memory that a call must move (inputs, outputs, states once each) as a share of
  the bandwidth measured in the same run, bytes read plus bytes written.
"""


def rate(record):
    """Useful GFLOP/s of the best sample."""
    return record["flops"] / best_ms(record) / 1e6


def share_of_fma(record):
    return rate(record) / record["fma_peak_gflops"] if record.get("fma_peak_gflops") else None


def share_of_copy(record):
    return record["bytes"] / best_ms(record) / 1e6 / record["copy_gb_per_s"]


def kernel_text(record):
    return record["impl"] if record["isa"] == "torch" else f"`{record['kernel']}`"


def ceilings(found):
    rows = []
    measured = [r for r in found if r.get("fma_peak_gflops")]
    for threads in sorted({r["threads"] for r in measured}):
        own = [r for r in measured if r["threads"] == threads]
        for isa in sorted({r["isa"] for r in own}):
            same = [r for r in own if r["isa"] == isa]
            bf16 = max(r.get("bf16_peak_gflops", 0) for r in same)
            fma = max(r["fma_peak_gflops"] for r in same)
            copy = max(r["copy_gb_per_s"] for r in same)
            figures = (f"{fma:.0f}", f"{bf16:.0f}" if bf16 else "-", f"{copy:.1f}")
            rows.append((threads, f"`{isa}`", *figures))
    head = ("threads", "kernel set", "fp32 FMA, GFLOP/s", "bf16 products, GFLOP/s", "memory, GB/s")
    return table(head, rows)


def calls(found, kind, runs):
    rows = []
    order = "regime threads isa precision".split()
    chosen = [r for r in found if r["kind"] == kind]
    chosen.sort(key=lambda r: (size_of(r["case"]), *(r[name] for name in order)))
    for r in chosen:
        share = share_of_fma(r) if kind == "prefill" else share_of_copy(r)
        amount = rate(r) if kind == "prefill" else r["bytes"] / best_ms(r) / 1e6
        times = (milliseconds(best_ms(r)), milliseconds(r["median_ms"]))
        spread = f"{milliseconds(r['p10_ms'])} to {milliseconds(r['p90_ms'])}"
        error = f"{scientific(r['error_out'])} / {scientific(r['error_state'])}"
        where = (r["case"], r["regime"], kernel_text(r), r["threads"])
        rows.append((*where, *times, spread, f"{amount:.1f}", percent(share), error, runs[r]))
    unit = ("GFLOP/s", "of FMA") if kind == "prefill" else ("GB/s", "of copy")
    head = ("case", "gates", "kernel", "threads", "best ms", "median", "p10 to p90", *unit)
    return table((*head, "error out / state", "run"), rows)


def pairs_of_threads(found):
    """[(record of one thread, record of several)] of the same call."""
    alone = {(r["case"], r["regime"], r["kernel"]): r for r in found if r["threads"] == 1}
    several = [r for r in found if r["threads"] > 1 and r["isa"] != "torch"]
    keys = [((r["case"], r["regime"], r["kernel"]), r) for r in several]
    return [(alone[key], r) for key, r in keys if key in alone]


def scaling(found):
    rows = []
    prefill = [r for r in found if r["kind"] == "prefill" and r["regime"] == "random"]
    for one, more in sorted(pairs_of_threads(prefill), key=lambda p: size_of(p[0]["case"])):
        gain = one["min_ms"] / more["min_ms"]  # on the wall both: processor time is not shared
        times = (milliseconds(one["min_ms"]), milliseconds(more["min_ms"]))
        load = f"{max(one['load'] + more['load']):.1f}"
        rows.append(
            (one["case"], f"`{one['kernel']}`", *times, more["threads"], f"{gain:.2f}", load)
        )
    head = ("case", "kernel", "one thread, ms", "several, ms", "threads", "gain", "load average")
    return table(head, rows) if rows else "No records with several threads.\n"


def overheads(found, runs):
    rows = []
    for r in sorted((r for r in found if r["kind"] == "overhead"), key=lambda r: r["case"]):
        figures = (f"{r[name]:.2f}" for name in ("python_us", "c_us", "overhead_us"))
        rows.append((r["case"], *figures, runs[r]))
    head = ("call of one token and head", "Python, us", "C, us", "difference, us", "run")
    return table(head, rows) if rows else "No records.\n"


def best(values):
    values = list(values)
    return max(values) if values else None


BUSY = 3  # a load average above which two threads on two cores do not run side by side


def gain_text(pairs):
    load = max((x for pair in pairs for r in pair for x in r["load"]), default=0)
    if load > BUSY:
        return f"no sound figure: load average {load:.0f}"
    gain = best(one["min_ms"] / more["min_ms"] for one, more in pairs)
    return "-" if gain is None else f"{gain:.2f}"


# What the project wants, in percent of the ceiling, with one thread.
PREFILL_GOALS = {"fp32": 77, "bf16": 115}
DECODE_GOAL = 90
WIDE = ("avx512", "avx512_bf16", "amx_bf16")  # the same fp32 functions


def goals(found):
    """What the project wants, and what the records say, with random gates."""
    known = [r for r in found if r["regime"] == "random" and r["isa"] != "torch"]

    def pick(case, sets=WIDE, precision="fp32", threads=1):
        return [
            r
            for r in known
            if r["case"] == case
            and r["isa"] in sets
            and r["precision"] == precision
            and r["threads"] == threads
        ]

    def fastest(*wanted):
        return best(-best_ms(r) for r in pick(*wanted))

    def ratio(factor, above, below):
        return "-" if above is None or below is None else f"{factor * above / below:.2f}"

    rows = []
    for precision, goal in PREFILL_GOALS.items():
        what = f"prefill {precision}"
        for case in ("2048x32", "8192x32"):
            share = best(share_of_fma(r) for r in pick(case, WIDE, precision))
            rows.append((f"{what}, {case}, one thread", f"{goal} % of FMA", percent(share)))
        short, long = (fastest(case, WIDE, precision) for case in ("512x32", "2048x32"))
        rows.append((f"{what}, T 512 against T 2048, per token", "1.0", ratio(4, short, long)))
        both = pick("8192x32", WIDE, precision) + pick("8192x32", WIDE, precision, 2)
        rows.append((f"{what}, 8192x32, two threads", "1.9", gain_text(pairs_of_threads(both))))
    share = best(share_of_copy(r) for r in pick("N1xH32"))
    rows.append(("decode, N1xH32, states in memory", f"{DECODE_GOAL} % of copy", percent(share)))
    share = best(share_of_fma(r) for r in pick("2048x32", ("avx2",)))
    rows.append(("AVX2 kernels, 2048x32", "65 % of its FMA", percent(share)))
    part = ratio(100, fastest("2048x32"), fastest("2048x32", ("avx2",)))
    rows.append(("AVX2 kernels, 2048x32, % of the AVX-512 rate", "45", part))
    above = [r["overhead_us"] for r in found if r["kind"] == "overhead"]
    text = f"{min(above):.1f} to {max(above):.1f} us" if above else "-"
    rows.append(("Python call above the C call", "3 us", text))
    return table(("what", "goal", "measured"), rows)


def section(cpu, found):
    runs = Runs(found)
    prefix = f"img/cpu-{slug(cpu)}"
    timed = [r for r in found if r["kind"] in ("prefill", "decode")]
    pictures = {
        f"{prefix}-prefill.png": (report_pictures.draw_cpu_prefill, timed),
        f"{prefix}-threads-decode.png": (report_pictures.draw_cpu_threads_decode, timed),
    }
    names = list(pictures)
    text = f"""## CPU: {cpu}

{EXPLANATION}
![Prefill as a share of the FMA peak of one core]({names[0]})

![Gain of several threads, and decode beside the bandwidth of memory]({names[1]})

### Goals and where this machine stands

{goals(found)}
### Ceilings of this machine

{ceilings(found)}
### Prefill

The PyTorch rows are the recurrence as a loop over tokens: what one would write without a library.

{calls(found, "prefill", runs)}
### Threads

{scaling(found)}
### Decode

One token for each of N sequences, with states that come from memory, not from a cache.

{calls(found, "decode", runs)}
### Python calls

{overheads(found, runs)}
### Runs

{runs.text()}
"""
    return text, pictures
