"""From samples to figures: percentiles, spreads, ratios, and whether a figure reaches what it must."""

import math
import statistics


def percentile(samples, share):
    """Linear between the two order statistics around `share` * (N - 1), as numpy and the common load generators do."""
    if not samples:
        raise ValueError("expected at least one sample, found none")
    ordered = sorted(samples)
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def spread(samples):
    """What is shown of many samples of one thing."""
    return {
        "count": len(samples),
        "median": statistics.median(samples),
        "p99": percentile(samples, 0.99),
        "min": min(samples),
        "max": max(samples),
    }


def verdict(value, must=None, aim=None, most=False):
    """What a figure reaches of what is asked for; `most`: the limits are upper ones."""
    reaches = (lambda limit: value <= limit) if most else (lambda limit: value >= limit)
    if aim is not None and reaches(aim):
        return "aim"
    if must is None:
        return "measured"
    return "must" if reaches(must) else "BELOW"


def growth(samples, early=(0.1, 0.25), late=0.85):
    """By which factor a series grew: the median of its last part over that of an early one, after what fills once has filled.

    `samples` are pairs of time and value, the parts shares of the time.
    """
    times = [time for time, _ in samples]
    begin, length = times[0], times[-1] - times[0]
    share = lambda time: (time - begin) / length if length else 0.0
    first = [value for time, value in samples if early[0] <= share(time) <= early[1]]
    last = [value for time, value in samples if share(time) >= late]
    if not first or not last:
        raise ValueError(f"expected samples in every part of the time, found {len(samples)} in all")
    return statistics.median(last) / statistics.median(first)


def parse_metrics(text):
    """The text form of OpenMetrics: name to a list of labels and value."""
    figures = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        name, labels, value = split_sample(line)
        figures.setdefault(name, []).append((labels, value))
    return figures


def split_sample(line):
    """`name{label="value",…} number` in three parts."""
    if "{" not in line:
        name, value = line.split()[:2]
        return name, {}, float(value)
    name, rest = line.split("{", 1)
    labels, at = {}, 0
    while rest[at] != "}":
        equal = rest.index("=", at)
        key, at = rest[at:equal].strip(","), equal + 2
        begin = at
        while rest[at] != '"':
            at += 2 if rest[at] == "\\" else 1
        labels[key] = rest[begin:at].replace('\\"', '"').replace("\\n", "\n").replace("\\\\", "\\")
        at += 1
        if rest[at] == ",":
            at += 1
    return name, labels, float(rest[at + 1 :].split()[0])


def total(figures, name, **wanted):
    """The sum of a figure over all its labels, or over those that are wanted. One that there isn't is 0."""
    entries = figures.get(name, [])
    return sum(value for labels, value in entries if all(labels.get(key) == value for key, value in wanted.items()))


def change(before, after, name):
    return total(after, name) - total(before, name)
