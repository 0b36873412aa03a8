"""From samples to a table: medians, ratios, and whether a case reaches what it must."""

import statistics


def spread(samples):
    """Median and range of at least one number."""
    return {
        "median": statistics.median(samples),
        "min": min(samples),
        "max": max(samples),
        "samples": list(samples),
    }


def ratio(ours, peer):
    """Ours by the peer's: of the medians, and the range over rounds, which pair runs that followed each other."""
    rounds = [a / b for a, b in zip(ours["rounds"], peer["rounds"])]
    return {"median": ours["median"] / peer["median"], "min": min(rounds), "max": max(rounds)}


def with_rounds(rounds):
    """The spread of all samples of all rounds, and each round's median."""
    whole = spread([sample for samples in rounds for sample in samples])
    return {**whole, "rounds": [statistics.median(samples) for samples in rounds]}


def verdict(case, value):
    """What a ratio reaches of what a case asks for."""
    if case.get("aim") is not None and value >= case["aim"]:
        return "aim"
    if case.get("must") is None:
        return "measured"
    return "must" if value >= case["must"] else "BELOW"


def select(cases, only):
    """The cases asked for, in the table's order. Raises ValueError for one that there isn't."""
    known = [case["id"] for case in cases]
    unknown = [name for name in only if name not in known]
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: expected one of {', '.join(known)}")
    return [case for case in cases if not only or case["id"] in only]


def rate(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def factor(value):
    return "–" if value is None else f"{value:.1f} x"


def markdown(report):
    """The report as people read it."""
    machine = report["machine"]
    limits = report["limits"]
    giga = lambda name: f"{limits[name] / 1e9:,.0f}" if limits.get(name) else "–"
    lines = [
        f"{report['date']}, commit {report['commit']}, {machine['cpu']}, {machine['cores']} cores, "
        f"{report['threads']} threads, {report['precision']}. Peer: {report['peer']}. "
        f"{report['rounds']} alternating rounds; medians, in brackets the range.",
        "",
        f"Limits of the machine, measured beside: {limits['read_bytes_per_second'] / 1e9:.1f} GB/s read; "
        f"int8 {giga('int8_operations_per_second')}, int8 by matrix instructions "
        f"{giga('int8_matrix_operations_per_second')}, bf16 {giga('bf16_operations_per_second')}, "
        f"f32 {giga('f32_operations_per_second')} Gop/s.",
        "",
        "| case | peer, tokens/s | ours, tokens/s | ratio | must | aim | reached | share of limit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in report["cases"]:
        cells = []
        for side in (row["peer"], row["ours"]):
            cells.append(f"{rate(side['median'])} ({rate(side['min'])} to {rate(side['max'])})")
        ratios = row["ratio"]
        share = row["share_of_limit"]
        lines.append(
            f"| {row['title']} | {cells[0]} | {cells[1]} | **{ratios['median']:.2f} x** "
            f"({ratios['min']:.2f} to {ratios['max']:.2f}) | {factor(row['must'])} | {factor(row['aim'])} | "
            f"{row['reached']} | {'–' if share is None else f'{100 * share:.0f}%'} |"
        )
    lines += ["", "| case | peak memory, peer | ours |", "|---|---|---|"]
    mib = lambda n: "–" if n is None else f"{n / 2**20:,.0f} MiB"
    for row in report["cases"]:
        lines.append(f"| {row['title']} | {mib(row['peer_peak_rss_bytes'])} | {mib(row['ours_peak_rss_bytes'])} |")
    start = report.get("start_to_first_token")
    if start:
        lines += ["", "| process start to first token | peer (server) | ours |", "|---|---|---|"]
        both = [f"{side['median']:.2f} s ({side['min']:.2f} to {side['max']:.2f})" for side in (start["peer"], start["ours"])]
        lines.append(f"| {start['file']}, cached, {start['prompt_bytes']} bytes of prompt | {both[0]} | {both[1]} |")
    if report.get("divergence"):
        lines += ["", "| mean KL to float32 | tokens | mean | largest | top-1 agreement |", "|---|---|---|---|---|"]
        for row in report["divergence"]:
            lines.append(
                f"| {row['file']}, {row['precision']} | {row['tokens']} | {row['kl_mean']:.2g} | {row['kl_max']:.2g} | "
                f"{100 * row['top1_agreement']:.2f}% |"
            )
    return "\n".join(lines) + "\n"
