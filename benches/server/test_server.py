"""python3 -m unittest discover -s benches/server"""

import asyncio
import json
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import attacks
import client
import determinism
import figures
import load
import model
import prompts
import report
import served
import soak
import soak_requests

DATA = json.loads(Path(__file__).with_name("cases.json").read_text())
ADDRESS = ("127.0.0.1", 1)


class Model(unittest.TestCase):
    def test_a_file_of_another_type_is_refused(self):
        told = "x.gguf\n  format          gguf\n  stored as       q4_1 69%, q8_0 31%, 5.74 bits a parameter\n"
        self.assertEqual(model.most_stored(told), "q4_1")
        self.assertEqual(model.most_stored("nothing"), "no line `stored as`")
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(model, "output", return_value=told):
            Path(folder, "x.gguf").touch()
            find = lambda type: model.served_file({"name": "x", "type": type}, Path(folder), Path("own"), None)
            self.assertEqual(find("Q4_1"), Path(folder, "x.gguf"))
            with self.assertRaisesRegex(served.Failed, "expected most weights in q4_0, found q4_1"):
                find("Q4_0")


class Figures(unittest.TestCase):
    def test_percentiles_lie_between_samples(self):
        self.assertEqual(figures.percentile([3.0], 0.99), 3.0)
        self.assertEqual(figures.percentile([4.0, 1.0, 2.0, 3.0], 0.5), 2.5)
        self.assertEqual([figures.percentile(range(101), share) for share in (0, 0.99, 1)], [0, 99, 100])
        with self.assertRaisesRegex(ValueError, "found none"):
            figures.percentile([], 0.5)

    def test_verdicts(self):
        self.assertEqual([figures.verdict(value, 1.5, 2.0) for value in (1.49, 1.5, 2.0)], ["BELOW", "must", "aim"])
        self.assertEqual([figures.verdict(value, 2.0, most=True) for value in (2.0, 2.1)], ["must", "BELOW"])
        self.assertEqual(figures.verdict(0.1), "measured")

    def test_growth_leaves_out_the_beginning(self):
        series = [(time, 10 if time < 8 else 100 + (time > 80)) for time in range(100)]
        self.assertAlmostEqual(figures.growth(series), 1.01)
        with self.assertRaisesRegex(ValueError, "every part"):
            figures.growth([(0, 1), (1, 1)])

    def test_metrics(self):
        text = '# HELP a x\na_total{m="x,}y",r="s\\"t"} 3\na_total{m="z",r="u"} 4.5\nb 1e-3\n# EOF\n'
        found = figures.parse_metrics(text)
        self.assertEqual(found["a_total"][0], ({"m": "x,}y", "r": 's"t'}, 3.0))
        self.assertEqual((figures.total(found, "a_total"), figures.total(found, "a_total", m="z"), figures.total(found, "c")), (7.5, 4.5, 0))
        self.assertEqual(figures.change({}, found, "b"), 0.001)


def event(value):
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def chunked(parts):
    return b"".join(f"{len(part):x}\r\n".encode() + part + b"\r\n" for part in parts) + b"0\r\n\r\n"


class Replies(unittest.TestCase):
    BODY = [event({"choices": [{"text": "a", "finish_reason": None, "index": 0}]}), b": ping\n\n",
            event({"choices": [{"text": "", "finish_reason": None, "index": 0}]}),
            event({"choices": [{"text": "b", "finish_reason": "length", "index": 0}]}),
            event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}}),
            event(b"[DONE]")]
    HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-A: b: c\r\n\r\n"

    def split(self, data, size):
        return [(float(at // size), data[at : at + size]) for at in range(0, len(data), size)]

    def test_any_cut_gives_the_same_events(self):
        data = self.HEAD + chunked(self.BODY)
        wanted = [bytes(part[6:-2]).decode() for part in self.BODY if part.startswith(b"data")]
        for size in (1, 2, 3, 7, 64, len(data)):
            reply = client.read_reply(0.0, self.split(data, size))
            self.assertEqual((reply.status, reply.headers["x-a"], reply.complete), (200, "b: c", True))
            self.assertEqual([data for _, data in reply.events()], wanted, size)

    def test_a_cut_stream_is_not_complete(self):
        data = self.HEAD + chunked(self.BODY)[:-5]
        self.assertFalse(client.read_reply(0.0, [(1.0, data)]).complete)

    def test_times_are_those_of_text(self):
        parts = [self.HEAD, *(chunked([part])[: -5] for part in self.BODY), b"0\r\n\r\n"]
        sample = client.read_sample(client.read_reply(10.0, [(11.0 + number, part) for number, part in enumerate(parts)]))
        self.assertEqual((sample.times, sample.tokens, sample.prompt_tokens, sample.cached_tokens), ([12.0, 15.0], 3, 5, 2))
        self.assertEqual((sample.ttft, sample.latency, sample.tpot, sample.gaps()), (2.0, 5.0, 1.5, [(15.0, 3.0)]))

    def test_what_is_no_answer(self):
        for pieces, message in (
            ([(0.0, b"\x15\x03")], "expected a head"), ([(0.0, b"SSH-2.0\r\n\r\n")], "line of status"),
        ):
            with self.assertRaisesRegex(client.Broken, message):
                client.read_reply(0.0, pieces)
        refused = client.read_reply(0.0, [(0.0, b"HTTP/1.1 400 Bad Request\r\nContent-Length: 2\r\n\r\n{}")])
        with self.assertRaisesRegex(client.Broken, "expected status 200, found 400"):
            client.read_sample(refused)
        error = client.read_reply(0.0, [(0.0, self.HEAD + chunked([event({"error": {"message": "x"}})]))])
        with self.assertRaisesRegex(client.Broken, "the error"):
            client.read_sample(error)

    def test_requests(self):
        data = client.request("POST", "/x", ADDRESS, {"a": 1}, [("X-B", "c")])
        self.assertTrue(data.endswith(b'Content-Length: 7\r\n\r\n{"a":1}'))
        self.assertNotIn(b"Content-Length", client.request("GET", "/x", ADDRESS))

    def test_an_exchange_over_a_socket(self):
        async def one():
            async def answer(reader, writer):
                await reader.readuntil(b"\r\n\r\n")
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
                writer.close()

            async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
                return await client.get(server.sockets[0].getsockname(), "/")

        self.assertEqual(asyncio.run(one()).text(), "ok")


class Measures(unittest.TestCase):
    def sample(self, begun, *times):
        return client.Sample(begun, list(times), len(times), 5, 0)

    def test_mixed_counts_what_a_long_prompt_touches(self):
        longs = [self.sample(10.0, 20.0, 21.0)]
        shorts = [self.sample(0.0, 1.0, 2.0), self.sample(8.0, 9.0, 12.0, 15.0)]
        found = load.mixed_figures([shorts[0]], shorts, longs)
        self.assertEqual((found["tpot"]["count"], found["gaps"]["count"], found["tpot"]["median"]), (1, 2, 3.0))
        self.assertEqual(found["long_ttft"]["median"], 10.0)

    def test_shares_of_steps(self):
        after = figures.parse_metrics("qwen:step_seconds_total 10\nqwen:forward_seconds_total 9.8\nqwen:plan_seconds_total 0.1\n")
        self.assertAlmostEqual(load.shares({}, after)["all_but_the_model"], 0.02)
        self.assertIsNone(load.shares(after, after))

    def test_answers_of_another_length_are_told(self):
        exchange = mock.Mock(pieces=[(1.0, Replies.HEAD + chunked(Replies.BODY))])
        self.assertEqual(load.samples_of([(0.0, exchange)], 3)[0].tokens, 3)
        with self.assertRaisesRegex(served.Failed, "expected answers of 64 tokens"):
            load.samples_of([(0.0, exchange)], 64)

    def test_differences_name_what_differs(self):
        one = determinism.result("a", [1], {"token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5}]})
        self.assertEqual(determinism.differences(one, dict(one)), [])
        self.assertEqual(determinism.differences(one, {**one, "logprobs": [-0.5000001]}), ["logprobs"])

    def test_prompts_repeat_by_seed_alone(self):
        ids = list(range(100))
        self.assertEqual(prompts.Prompts(ids, 1).several(2, 9), prompts.Prompts(ids, 1).several(2, 9))
        self.assertNotEqual(prompts.Prompts(ids, 1).draw(9), prompts.Prompts(ids, 2).draw(9))
        shared = prompts.Prompts(ids, 1).several(2, 9, prefix=[7] * 8)
        self.assertEqual([(len(one), one[:8]) for one in shared], [(9, [7] * 8)] * 2)
        with self.assertRaisesRegex(ValueError, "at least 64"):
            prompts.Prompts([1], 1)

    def test_memory_of_a_process(self):
        self.assertEqual(served.status_bytes("Name:\tx\nVmRSS:\t  12 kB\n", "VmRSS"), 12288)


class SoakJudges(unittest.TestCase):
    def requests(self):
        limits = {**DATA["soak"]["limits"], "body_bytes": 100}
        return soak_requests.Requests(ADDRESS, prompts.Prompts(list(range(100)), 1), limits)

    def test_every_kind_makes_requests(self):
        requests = self.requests()
        for kind in DATA["soak"]["kinds"]:
            for _ in range(20):
                plan = requests.plan(kind)
                self.assertTrue(plan.data)
                self.assertTrue(plan.answers or plan.refused or plan.leaves, kind)

    def reply(self, *parts):
        return client.read_reply(0.0, [(0.0, Replies.HEAD + chunked(parts))])

    def test_one_finish_reason_for_each_answer(self):
        plan = soak_requests.Plan(b"", soak_requests.COMPLETIONS, answers=2, stream=True)
        last = lambda index, reason="stop": event({"choices": [{"index": index, "finish_reason": reason}]})
        done = event(b"[DONE]")
        self.assertIsNone(soak_requests.ended(plan, self.reply(last(0, None), last(1), last(0), done)))
        for parts in ((last(0), done), (last(0), last(0), last(1), done), (last(0), last(1)), (event({"error": 1}), done), ()):
            self.assertIsNotNone(soak_requests.ended(plan, self.reply(*parts)), parts)

    def test_other_protocols_end_too(self):
        plan = soak_requests.Plan(b"", soak_requests.MESSAGES, answers=1, stream=True)
        good = [event({"type": "message_delta", "delta": {"stop_reason": "end_turn"}}), event({"type": "message_stop"})]
        self.assertIsNone(soak_requests.ended(plan, self.reply(*good)))
        self.assertIsNotNone(soak_requests.ended(plan, self.reply(good[0])))
        plan = soak_requests.Plan(b"", soak_requests.RESPONSES, answers=1, stream=True)
        self.assertIsNone(soak_requests.ended(plan, self.reply(event({"type": "response.completed"}))))
        self.assertIsNotNone(soak_requests.ended(plan, self.reply(event({"type": "response.failed"}))))

    def test_accounts(self):
        text = ('vllm:request_success_total{finished_reason="stop"} 3\nvllm:request_success_total{finished_reason="length"} 2\n'
                "vllm:e2e_request_latency_seconds_count 5\nvllm:request_params_n_sum 6\nqwen:abandoned_total 1\n"
                'qwen:http_responses_total{path="/x",status="200"} 9\nqwen:kv_blocks 8\nqwen:kv_blocks_cached 8\n')
        checks, numbers = soak.accounts(figures.parse_metrics(text), 5)
        self.assertTrue(all(checks.values()), checks)
        self.assertEqual(numbers["begun"], 6)
        for lost in ("qwen:abandoned_total 1\n", "vllm:e2e_request_latency_seconds_count 5\n"):
            checks, _ = soak.accounts(figures.parse_metrics(text.replace(lost, "")), 5)
            self.assertFalse(all(checks.values()), lost)
        checks, _ = soak.accounts(figures.parse_metrics(text + 'qwen:http_responses_total{path="/x",status="500"} 1\n'), 5)
        self.assertFalse(checks["no response was 5xx but 503"])


class Cases(unittest.TestCase):
    def test_attacks_are_named_and_bounded(self):
        listed = attacks.attacks(ADDRESS, DATA["attack"]["budgets"], ADDRESS)
        self.assertEqual(len({attack.name for attack in listed}), len(listed))
        for attack in listed:
            self.assertTrue(attack.statuses <= {200, 400, 403, 404, 405, 408, 413, 414, 415, 431, 505, None}, attack.name)
            self.assertGreater(attack.budget, 0)

    def test_load_asks_for_what_is_promised(self):
        for part in ("load", "shared"):
            for level in DATA[part]["levels"]:
                self.assertGreaterEqual(level["requests"], level["clients"])
                self.assertIn("must", level)
        self.assertEqual([level["clients"] for level in DATA["load"]["levels"]], [1, 8, 32])


class Report(unittest.TestCase):
    def run_of(self, rate, ttft, shares=None):
        samples = [{"ttft": ttft, "tpot": 0.01}] * 2
        memory = {"rss": 1 << 20, "peak": 2 << 20}
        one = {"tokens_per_second": rate, "samples": samples, "shares": shares, "memory": memory, "generator_cores": 0.1}
        return {"levels": [one], "memory_idle": memory}

    def test_load(self):
        case = {"levels": [{"clients": 1, "must": 1.5, "aim": 2.0}], "overhead_must": 0.03}
        shares = {"all_but_the_model": 0.02, "planning": 0.01, "choosing": 0.005}
        ours = [self.run_of(rate, 0.1, shares) for rate in (20.0, 30.0)]
        peer = [self.run_of(rate, 0.2) for rate in (10.0, 10.0)]
        rows = {row["title"]: row for row in report.load_rows(case, ours, peer)}
        speed = rows["1 client: output tokens/s"]
        self.assertEqual((speed["ratio"], speed["must"], speed["reached"]), ("2.50 x (2.00 to 3.00)", "1.5 x", "aim"))
        first = rows["1 client: time to first token, P99 of 4"]
        self.assertEqual((first["ours"], first["peer"], first["ratio"], first["reached"]), ("100.0 ms", "200.0 ms", "0.50 x", "must"))
        share = next(row for title, row in rows.items() if "not the model" in title)
        self.assertEqual((share["ours"], share["must"], share["reached"]), ("2.00% (2.00% to 2.00%)", "3% at most", "must"))

    def test_a_slower_first_token_is_below(self):
        case = {"levels": [{"clients": 8, "must": 2.5, "aim": None}]}
        rows = report.load_rows(case, [self.run_of(30.0, 0.3)], [self.run_of(10.0, 0.2)])
        self.assertEqual([row["reached"] for row in rows if "P99" in row["title"] and "first" in row["title"]], ["BELOW"])

    def test_markdown_has_every_row(self):
        part = {"title": "t", "rounds": 3, "rows": [report.row("a", "1", must="all", reached="must"), report.row("b", "2", "3", "1.50 x")]}
        text = report.markdown({
            "date": "d", "commit": "c", "machine": {"cpu": "x", "cores": 2}, "threads": 2, "model": "m", "peer": "p", "parts": [part],
        })
        self.assertIn("**t**; 3 rounds", text)
        self.assertIn("| a | – | 1 | – | all | – | must |", text)
        self.assertIn("| b | 3 | 2 | 1.50 x | – | – | measured |", text)


if __name__ == "__main__":
    unittest.main()
