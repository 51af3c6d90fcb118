"""The CPU part of docs/benchmarks.md."""

import report_pictures
from report_text import Runs, milliseconds, percent, scientific, size_of, slug, table

EXPLANATION = """\
* **fastest** is the fastest sample, **median** the one in the middle. Shares are of the fastest,
  as the ceilings are: whatever else a machine does only makes both slower. Where the median is far
  from the fastest, the machine was busy; the runs below say how busy.
* **of FMA** is the useful work, 98.3 kFLOP a token and head, as a share of the peak of the kernel
  set's fp32 multiply-add units on as many threads, measured in the same run. Work that a kernel
  does beyond the useful (norms, gates, exponentials, the solve inside a chunk) counts against it.
  Kernels with bf16 products may pass 100 %: their units are faster.
* **of copy** is the memory that a call must move (inputs, outputs, states once each) as a share of
  the bandwidth measured in the same run, bytes read plus bytes written.
"""


def rate(record):
    """Useful GFLOP/s of the fastest sample."""
    return record["flops"] / record["min_ms"] / 1e6


def share_of_fma(record):
    return rate(record) / record["fma_peak_gflops"] if record.get("fma_peak_gflops") else None


def share_of_copy(record):
    return record["bytes"] / record["min_ms"] / 1e6 / record["copy_gb_per_s"]


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
        amount = rate(r) if kind == "prefill" else r["bytes"] / r["min_ms"] / 1e6
        times = (milliseconds(r["min_ms"]), milliseconds(r["median_ms"]))
        spread = f"{milliseconds(r['p10_ms'])} to {milliseconds(r['p90_ms'])}"
        error = f"{scientific(r['error_out'])} / {scientific(r['error_state'])}"
        where = (r["case"], r["regime"], kernel_text(r), r["threads"])
        rows.append((*where, *times, spread, f"{amount:.1f}", percent(share), error, runs[r]))
    unit = ("GFLOP/s", "of FMA") if kind == "prefill" else ("GB/s", "of copy")
    head = ("case", "gates", "kernel", "threads", "fastest ms", "median", "p10 to p90", *unit)
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
        gain = one["min_ms"] / more["min_ms"]
        times = (milliseconds(one["min_ms"]), milliseconds(more["min_ms"]))
        rows.append((one["case"], f"`{one['kernel']}`", *times, more["threads"], f"{gain:.2f}"))
    head = ("case", "kernel", "one thread, ms", "several, ms", "threads", "gain")
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


def goals(found):
    """What the project wants, and the records' answer: the widest fp32 set, the fastest bf16 one,
    random gates, fastest samples."""

    def pick(kind, **wanted):
        rows = [r for r in found if r["kind"] == kind and r["regime"] == "random"]
        return [r for r in rows if all(r.get(name) == value for name, value in wanted.items())]

    def ms(case, **wanted):
        return [r["min_ms"] for r in pick("prefill", case=case, threads=1, **wanted)]

    def shares(case, **wanted):
        return best(
            share_of_fma(r)
            for r in pick("prefill", case=case, threads=1, **wanted)
            if r["isa"] != "torch"
        )

    rows = []
    for case in ("2048x32", "8192x32"):
        share = shares(case, precision="fp32", isa="avx512")
        rows.append((f"prefill fp32, {case}, one thread", "77 % of FMA", percent(share)))
        share = shares(case, precision="bf16")
        rows.append((f"prefill bf16, {case}, one thread", "115 % of FMA", percent(share)))
    for isa, precision in (("avx512", "fp32"), ("amx_bf16", "bf16")):
        short, long = (ms(case, isa=isa, precision=precision) for case in ("512x32", "2048x32"))
        ratio = f"{4 * short[0] / long[0]:.2f}" if short and long else "-"
        rows.append((f"prefill {precision}, T 512 against T 2048, per token", "1.0", ratio))
        pairs = pairs_of_threads(pick("prefill", isa=isa, precision=precision))
        gain = best(one["min_ms"] / two["min_ms"] for one, two in pairs if two["threads"] == 2)
        rows.append((f"prefill {precision}, two threads", "1.9", f"{gain:.2f}" if gain else "-"))
    decode = best(share_of_copy(r) for r in pick("decode", case="N1xH32", threads=1, isa="avx512"))
    rows.append(("decode, N1xH32, states in memory", "90 % of copy", percent(decode)))
    narrow, wide = ms("2048x32", isa="avx2"), ms("2048x32", isa="avx512", precision="fp32")
    share = shares("2048x32", isa="avx2")
    rows.append(("AVX2 kernels, 2048x32", "65 % of its FMA", percent(share)))
    part = percent(wide[0] / narrow[0]) if narrow and wide else "-"
    rows.append(("AVX2 kernels, 2048x32", "45 % of the AVX-512 rate", part))
    calls_of_one = [r["overhead_us"] for r in found if r["kind"] == "overhead"]
    text = f"{min(calls_of_one):.1f} to {max(calls_of_one):.1f} us" if calls_of_one else "-"
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
