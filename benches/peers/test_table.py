"""python3 -m unittest discover -s benches/peers"""

import json
import unittest
from pathlib import Path

import table


class Table(unittest.TestCase):
    def test_spread(self):
        whole = table.with_rounds([[1.0, 3.0], [5.0, 7.0], [2.0]])
        self.assertEqual((whole["median"], whole["min"], whole["max"]), (3.0, 1.0, 7.0))
        self.assertEqual(whole["rounds"], [2.0, 6.0, 2.0])

    def test_ratio_pairs_rounds(self):
        ours, peer = table.with_rounds([[4.0], [6.0]]), table.with_rounds([[2.0], [2.0]])
        self.assertEqual(table.ratio(ours, peer), {"median": 2.5, "min": 2.0, "max": 3.0})

    def test_verdicts(self):
        case = {"must": 1.5, "aim": 2.0}
        self.assertEqual([table.verdict(case, value) for value in (1.49, 1.5, 1.99, 2.0)], ["BELOW", "must", "must", "aim"])
        self.assertEqual(table.verdict({"must": 1.5, "aim": None}, 9.0), "must")
        self.assertEqual(table.verdict({"must": None, "aim": None}, 0.1), "measured")

    def test_selection(self):
        cases = [{"id": "a"}, {"id": "b"}]
        self.assertEqual(table.select(cases, []), cases)
        self.assertEqual(table.select(cases, ["b"]), [{"id": "b"}])
        with self.assertRaisesRegex(ValueError, "c: expected one of a, b"):
            table.select(cases, ["c"])

    def test_cases_are_complete(self):
        data = json.loads(Path(__file__).with_name("cases.json").read_text())
        names = [case["id"] for case in data["cases"]]
        self.assertEqual(len(names), len(set(names)))
        for case in data["cases"]:
            self.assertIn(case["file"], data["files"])
            self.assertNotEqual("prompt" in case, "generate" in case, case["id"])
            self.assertIn("must", case)
            self.assertIn("aim", case)
        for made in data["files"].values():
            self.assertEqual(len({"fetch", "quantise", "synth"} & made.keys()), 1)

    def test_markdown_has_a_row_for_each_case(self):
        side = table.with_rounds([[10.0], [12.0]])
        row = {
            "title": "decode", "peer": side, "ours": side, "ratio": table.ratio(side, side), "must": 1.0, "aim": None,
            "reached": "must", "share_of_limit": None, "peer_peak_rss_bytes": 1 << 20, "ours_peak_rss_bytes": None,
        }
        report = {
            "date": "d", "commit": "c", "machine": {"cpu": "x", "cores": 2}, "threads": 2, "precision": "balanced",
            "peer": "p", "rounds": 2, "limits": {"read_bytes_per_second": 1e10}, "cases": [row],
        }
        text = table.markdown(report)
        self.assertIn("| decode | 11.0 (10.0 to 12.0) | 11.0 (10.0 to 12.0) | **1.00 x** (1.00 to 1.00) | 1.0 x | – | must | – |", text)
        self.assertIn("| decode | 1 MiB | – |", text)


if __name__ == "__main__":
    unittest.main()
