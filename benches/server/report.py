"""From measurements to rows: what was measured, what it must be, whether it is; and the table that people read."""

import statistics

from figures import percentile, spread, verdict


def row(title, ours, peer=None, ratio=None, must=None, aim=None, reached="measured"):
    return {"title": title, "peer": peer, "ours": ours, "ratio": ratio, "must": must, "aim": aim, "reached": reached}


def seconds(value):
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def ranged(values, show):
    middle = show(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} ({show(min(values))} to {show(max(values))})"


def rate(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def mebibytes(value):
    return f"{value / 2**20:,.0f} MiB"


def pooled(runs, number, name):
    return [sample[name] for run in runs for sample in run["levels"][number]["samples"]]


def load_rows(case, ours, peer):
    """Throughput: medians over rounds, the ratio with its range over rounds. Times: of all requests of all rounds."""
    rows = []
    for number, wanted in enumerate(case["levels"]):
        level = lambda runs: [run["levels"][number] for run in runs]
        clients = f"{wanted['clients']} client{'s' if wanted['clients'] > 1 else ''}"
        rates = [[one["tokens_per_second"] for one in level(runs)] for runs in (ours, peer)]
        ratio = statistics.median(rates[0]) / statistics.median(rates[1])
        rounds = [a / b for a, b in zip(*rates)]
        asked = f"{wanted['must']:g} x" if wanted["must"] else None
        aimed = f"{wanted['aim']:g} x" if wanted["aim"] else None
        rows.append(row(
            f"{clients}: output tokens/s", ranged(rates[0], rate), ranged(rates[1], rate),
            f"{ratio:.2f} x ({min(rounds):.2f} to {max(rounds):.2f})", asked, aimed, verdict(ratio, wanted["must"], wanted["aim"]),
        ))
        for name, title in (("ttft", "time to first token"), ("tpot", "time per token")):
            a, b = spread(pooled(ours, number, name)), spread(pooled(peer, number, name))
            judged = name == "ttft" and wanted["must"]
            rows.append(row(f"{clients}: {title}, median", seconds(a["median"]), seconds(b["median"]), f"{a['median'] / b['median']:.2f} x"))
            rows.append(row(
                f"{clients}: {title}, P99 of {a['count']}", seconds(a["p99"]), seconds(b["p99"]), f"{a['p99'] / b['p99']:.2f} x",
                "1 x at most" if judged else None, None,
                verdict(a["p99"] / b["p99"], 1.0 if judged else None, most=True),
            ))
        rows += overhead_rows(case, clients, level(ours))
        cores = [statistics.median(one["generator_cores"] for one in level(runs)) for runs in (ours, peer)]
        rows.append(row(f"{clients}: the load generator's share of one core", f"{cores[0]:.1%}", f"{cores[1]:.1%}"))
    peaks = [max(run["levels"][-1]["memory"]["peak"] for run in runs) for runs in (ours, peer)]
    idle = [max(run["memory_idle"]["rss"] for run in runs) for runs in (ours, peer)]
    rows.append(row("resident memory when ready", mebibytes(idle[0]), mebibytes(idle[1])))
    rows.append(row("resident memory at most", mebibytes(peaks[0]), mebibytes(peaks[1])))
    return rows


def overhead_rows(case, clients, levels):
    shares = [one["shares"] for one in levels if one["shares"]]
    must = case.get("overhead_must")
    if not shares:
        return []
    others = [share["all_but_the_model"] for share in shares]
    median = statistics.median(others)
    planning = statistics.median(share["planning"] for share in shares)
    choosing = statistics.median(share["choosing"] for share in shares)
    return [row(
        f"{clients}: share of steps that is not the model (planning {planning:.2%}, choosing {choosing:.2%})",
        ranged(others, lambda share: f"{share:.2%}"), must=f"{must:.0%} at most" if must else None,
        reached=verdict(median, must, most=True),
    )]


def mixed_rows(case, ours, peer):
    both = (ours, peer)
    gather = lambda runs, name: [value for run in runs for value in run["samples"][name]]
    by = lambda values: percentile(values, 0.99) / percentile(values, 0.5)
    tpot, gaps = [gather(runs, "tpot") for runs in both], [gather(runs, "gaps") for runs in both]
    alone = [statistics.median(run["tpot_alone"]["median"] for run in runs) for runs in both]
    longs = [statistics.median(gather(runs, "long_ttft")) for runs in both]
    return [
        row("time per token of short streams, P99 / P50", f"{by(tpot[0]):.2f}", f"{by(tpot[1]):.2f}", None, f"{case['must']:g} at most", None,
            verdict(by(tpot[0]), case["must"], most=True)),
        row("time per token of short streams, P50", *(seconds(percentile(values, 0.5)) for values in tpot)),
        row("time per token of short streams, P99", *(seconds(percentile(values, 0.99)) for values in tpot)),
        row("single gaps between tokens, P99 / P50", *(f"{by(values):.2f}" for values in gaps)),
        row("single gaps between tokens, P99", *(seconds(percentile(values, 0.99)) for values in gaps)),
        row("time per token without long prompts, P50", *(seconds(value) for value in alone)),
        row("time to first token of the long prompts, median", *(seconds(value) for value in longs)),
    ]


def idle_rows(case, runs):
    above = max(run["above"] for run in runs)
    last = runs[-1]
    good = all(run["ended"] == 0 and not any(run["left"].values()) for run in runs)
    return [
        row(f"resident memory above the model with {last['streams']:,} streams ({last['silent']} silent)", mebibytes(above),
            must=f"{case['must_bytes'] / 1e6:.0f} MB at most", reached=verdict(above, case["must_bytes"], most=True)),
        row("resident memory with model, all of the KV cache written", mebibytes(last["filled"]["rss"])),
        row("all streams stay open, and nothing is left at work when they close", "yes" if good else "no", must="yes",
            reached="must" if good else "BELOW"),
    ]


def first_rows(case, starts):
    """`starts`: pairs of what was started, and its measurements."""
    rows = []
    for start, runs in starts:
        for name, title in (("ttft", "time to first token"), ("latency", "whole answer")):
            ratios = [run[name]["ratio"] for run in runs]
            steady = statistics.median(run[name]["steady"] for run in runs)
            must = case["must"] if start["judged"] else None
            rows.append(row(
                f"first request / later ones, {title} (later: {seconds(steady)}), {start['title']}", ranged(ratios, lambda ratio: f"{ratio:.2f}"),
                must=f"{must:g} at most" if must else None, reached=verdict(statistics.median(ratios), must, most=True),
            ))
        rows.append(row(f"start to ready, {start['title']}", ranged([run["seconds_to_ready"] for run in runs], seconds)))
    return rows


def attack_rows(case, runs):
    sent, right = sum(run["sent"] for run in runs), sum(run["right"] for run in runs)
    quick = sum(run["quick"] for run in runs)
    harmed = sum(run["visits"] + run["injected"] + (not run["alive"]) + any(run["left"].values()) for run in runs)
    medians, tails = [run["neighbours_ratio"] for run in runs], [run["neighbours_p99_ratio"] for run in runs]
    share = lambda good: row_yes(good == sent)
    return [
        row(f"the right refusal, of {runs[0]['attacks']} attacks", f"{right} of {sent}", must="all", reached=share(right)),
        row("within 100 ms or its budget", f"{quick} of {sent}", must="all", reached=share(quick)),
        row("visits to forbidden addresses, lines in the log, deaths, slots that are stuck", f"{harmed}", must="0", reached=row_yes(not harmed)),
        row("neighbours' gaps between tokens, attacked / not: median", ranged(medians, lambda ratio: f"{ratio:.2f}"),
            must=f"{case['must_median']:g} at most", reached=verdict(statistics.median(medians), case["must_median"], most=True)),
        row("the same, P99", ranged(tails, lambda ratio: f"{ratio:.2f}"), must=f"{case['must_p99']:g} at most",
            reached=verdict(statistics.median(tails), case["must_p99"], most=True)),
    ]


def row_yes(good):
    return "must" if good else "BELOW"


def determinism_rows(case, runs):
    equal, compared = sum(run["equal"] for run in runs), sum(run["compared"] for run in runs)
    ways = "; ".join(f"{way} {count}" for way, count in runs[0]["ways"].items())
    return [row(f"same tokens and log-probabilities, bit for bit ({ways})", f"{equal} of {compared}", must="all",
                reached=row_yes(equal == compared))]


def soak_rows(case, runs):
    rows = []
    for run in runs:
        grown = abs(run["growth"] - 1)
        consistent = all(run["checks"].values())
        left = sum(run["left"].values()) if run["left"] else None
        rows += [
            row(f"{run['requests']:,} requests in {run['minutes']:g} minutes, wrong outcomes", str(len(run["failures"])), must="0",
                reached=row_yes(not run["failures"])),
            row(f"{run['answers']:,} answers read to their end, each with one finish reason; alive, and exit status at the end",
                f"{'yes' if run['alive'] else 'no'}, {run['exit_code']}", must="yes, 0", reached=row_yes(run["alive"] and run["exit_code"] == 0)),
            row("resident memory, last part / early part", f"{run['growth']:.3f}", must=f"within {case['must_growth']:.0%}",
                reached=row_yes(grown <= case["must_growth"])),
            row("at work or held when all clients are gone", str(left), must="0", reached=row_yes(left == 0)),
            row(f"figures agree with each other ({run['figures']['preemptions']:,.0f} preemptions)", "yes" if consistent else "no", must="yes",
                reached=row_yes(consistent)),
        ]
    return rows


def markdown(report):
    machine = report["machine"]
    lines = [
        f"{report['date']}, commit {report['commit']}, {machine['cpu']}, {machine['cores']} cores, {report['threads']} threads, "
        f"{report['model']}. Peer: {report['peer']}.",
    ]
    for part in report["parts"]:
        rounds = f"; {part['rounds']} rounds" if part["rounds"] > 1 else ""
        lines += ["", f"**{part['title']}**{rounds}", "", "| figure | peer | ours | ours / peer | must | aim | reached |", "|---|---|---|---|---|---|---|"]
        for one in part["rows"]:
            cells = [one[name] or "–" for name in ("peer", "ours", "ratio", "must", "aim", "reached")]
            lines.append(f"| {one['title']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
