"""Live, ready, load, version, tokenize, docs, CORS: what is asked beside generation."""

import asyncio
import re
import time

import pytest

from cluster.api.routes.readiness import PROBE_PRIORITY
from cluster.config.api_keys import KeyDigests
from cluster.errors import EngineDeadError
from cluster.supervisor.status import GroupStatus
from tests.unit.api_fakes import MODEL, Api, FakeBackend, assert_error, tiny_tokenizer

READY = ["/ready", "/health", "/ping"]


class Ranks(FakeBackend):
    """Ranks of which some give no token; `moving` ones go on with the steps of others."""

    def __init__(self, silent: tuple[int, ...] = (), moving: tuple[int, ...] = ()) -> None:
        super().__init__(num_ranks=3)
        self.silent = silent
        self.moving = moving
        self.steps = 0

    async def generate(self, request_id, prompt_token_ids, params, **options):
        if options["rank"] in self.silent:
            self.options[request_id] = options
            self.open.add(request_id)
            try:
                await asyncio.Event().wait()
            finally:
                self.open.discard(request_id)
        async for output in super().generate(request_id, prompt_token_ids, params, **options):
            yield output

    async def rank_stats(self):
        self.steps += 1
        return [
            {
                "rank": rank,
                "steps": self.steps,
                "idle_steps": 0 if rank in self.moving else self.steps,
            }
            for rank in range(3)
        ]


@pytest.mark.parametrize("path", READY)
def test_ready_means_a_token_from_every_rank(path):
    api = Api(Ranks())
    answer = api.get(path).json()
    assert answer == {"status": "ready", "groups": api.backend.group_states}
    options = sorted(api.backend.options.values(), key=lambda given: given["rank"])
    assert options == [{"priority": PROBE_PRIORITY, "rank": rank} for rank in range(3)]
    ((prompt, params), *_) = api.backend.requests.values()
    assert len(prompt) == 1 and params.max_tokens == 1


def test_asking_often_costs_nothing():
    api = Api(Ranks())
    for _ in range(5):
        assert api.get("/ready").status_code == 200
    assert len(api.backend.requests) == 3
    late = Api(Ranks(), probe_fresh_s=0.0)
    for _ in range(5):
        assert late.get("/ready").status_code == 200
    assert len(late.backend.requests) == 15


def test_tokens_of_real_requests_prove_their_rank():
    api = Api(Ranks(silent=(1,)), probe_timeout_s=0.05, probe_fresh_s=60.0)
    api.backend.token_times[1] = time.monotonic()
    assert api.get("/ready").status_code == 200
    assert sorted(given["rank"] for given in api.backend.options.values()) == [0, 2]
    api.backend.token_times = dict.fromkeys(range(3), time.monotonic() - 61)
    api.backend.options.clear()
    assert api.get("/ready").status_code == 503, "tokens of 61 s ago prove nothing"
    assert [given["rank"] for given in api.backend.options.values()] == [1]


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("rebuilding", "the group is rebuilding (stage weights) since "),
        ("draining", "the group is draining since "),
    ],
)
def test_a_group_that_does_not_serve_is_not_ready_and_gets_no_probe(state, reason):
    api = Api(Ranks())
    status = GroupStatus(state=state, stage="weights", error="rank 1: its process died")
    failed = GroupStatus(state="failed", error="rank 0: its process died")
    api.backend.group_states = [status.to_json(), failed.to_json()]
    answer = api.get("/ready")
    error = assert_error(answer, 503, "engine_unavailable")
    assert error["message"].startswith(reason) and "rank 1: its process died" in error["message"]
    assert answer.json()["groups"] == api.backend.group_states
    assert int(answer.headers["retry-after"]) > 0 and not api.backend.requests
    api.backend.group_states[1] = GroupStatus(state="serving").to_json()
    assert api.get("/ready").status_code == 200, "the other group takes the requests"


def test_ready_without_a_supervisor_judges_by_the_tokens():
    class Alone(Ranks):
        async def groups(self):
            raise EngineDeadError("the supervisor does not answer")

    assert Api(Alone()).get("/ready").json() == {"status": "ready", "groups": []}


def test_many_askers_share_a_probe():
    api = Api(Ranks())

    async def ask():
        async with api.client() as client:
            return await asyncio.gather(*(client.get("/ready") for _ in range(20)))

    assert {response.status_code for response in asyncio.run(ask())} == {200}
    assert len(api.backend.requests) == 3


def test_tokens_that_come_before_the_probe_begins_do_not_break_it():
    class Waking(Ranks):
        """The last rank proves itself between the decision to probe and the probe."""

        asked = 0

        def token_ages(self):
            self.asked += 1
            return dict.fromkeys(range(3), float("inf") if self.asked == 1 else 0.0)

    assert Api(Waking()).get("/ready").status_code == 200


def test_a_silent_rank_is_named_and_its_probe_aborted():
    api = Api(Ranks(silent=(1,)), probe_timeout_s=0.05)
    for _ in range(2):  # a failure is not remembered
        error = assert_error(api.get("/ready"), 503, "engine_unavailable")
        assert error["message"] == "no token in 0.05 s from rank 1"
        assert api.backend.open == set()
    api.backend.silent = ()
    assert api.get("/ready").status_code == 200


def test_a_pause_of_the_ingress_is_no_silence():
    """No time passes but the pause, in which rank 0 is to answer; its token comes some turns of the loop later."""

    class Pausing(Ranks):
        def token_ages(self):
            loop = asyncio.get_running_loop()
            self.now = loop.time()
            loop.time = lambda: self.now
            return super().token_ages()

        async def generate(self, request_id, prompt_token_ids, params, **options):
            if options["rank"] == 0:
                for paused_s in (0.0, 1000.0):
                    self.now += paused_s
                    for _ in range(10):
                        await asyncio.sleep(0)
            async for output in super().generate(request_id, prompt_token_ids, params, **options):
                yield output

    assert Api(Pausing()).get("/ready").status_code == 200


def test_a_busy_rank_is_ready_though_its_probe_waits():
    api = Api(Ranks(silent=(1, 2), moving=(1,)), probe_timeout_s=0.05)
    assert assert_error(api.get("/ready"), 503)["message"].endswith("from rank 2")
    api.backend.moving = (1, 2)
    assert api.get("/ready").status_code == 200


def test_steps_that_were_not_counted_before_prove_nothing():
    class Mute(Ranks):
        async def rank_stats(self):
            if not self.steps:
                self.steps = 100
                raise EngineDeadError("no answer")
            return await super().rank_stats()

    api = Api(Mute(silent=(1,), moving=(1,)), probe_timeout_s=0.05)
    assert assert_error(api.get("/ready"), 503)["message"].endswith("from rank 1")


def test_a_probe_that_fails():
    api = Api(Ranks())
    api.backend.error_output = "no KV blocks"
    assert assert_error(api.get("/ready"), 503)["message"] == "rank 0: no KV blocks"
    api.backend.error_output, api.backend.fail_before = None, EngineDeadError("rank 2 died")
    assert "rank 2 died" in assert_error(api.get("/ready"), 503)["message"]
    api.backend.fail_before = KeyError("secret")
    assert "secret" not in assert_error(api.get("/ready"), 503)["message"]


def test_probes_are_not_counted_as_requests():
    api = Api()
    assert api.get("/ready").status_code == 200
    text = api.get("/metrics").text
    assert not re.search(r"^phalanx:(request_success|time_to_first).* [1-9]", text, re.M)


def test_live_even_without_an_engine():
    api = Api()
    api.backend.ready = (False, "rank 1 died")
    assert api.get("/live").json() == {"status": "alive"}
    assert_error(api.get("/ready"), 503)


@pytest.mark.parametrize("path", ["/live", *READY])
def test_probes_by_head(path):
    assert Api().request("HEAD", path).status_code == 200


def test_ping_by_post():
    assert Api().request("POST", "/ping").json()["status"] == "ready"


def test_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+", Api().get("/version").json()["version"])


def test_docs_load_nothing_from_elsewhere():
    text = Api().get("/docs").text
    assert "/openapi.json" in text and not re.search(r"https?://|[\"']//[a-z]", text), text
    assets = re.findall(r'(?:src|href)="([^"]+)"', text)
    assert len(assets) == 3, "style, icon, script"
    for path in assets:
        assert Api().get(path).status_code == 200, path


def test_the_document_is_complete():
    document = Api().get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    for reference in re.findall(
        r'"\$ref": ?"#/components/schemas/(\w+)"', Api().get("/openapi.json").text
    ):
        assert reference in schemas
    for path, item in document["paths"].items():
        for operation in item.values():
            assert {"200", "4XX", "5XX"} <= operation["responses"].keys(), path
            assert "422" not in operation["responses"], path
    stream = document["paths"]["/v1/completions"]["post"]["responses"]["200"]["content"]
    assert set(stream) == {"application/json", "text/event-stream"}


def test_tokenize_a_prompt_and_back():
    api = Api()
    answer = api.post("/tokenize", {"model": MODEL, "prompt": "h\u00e9!"}).json()
    tokens = [0x68, 0xC3, 0xA9, 0x21]
    assert answer == {"count": 4, "max_model_len": 1000, "tokens": tokens, "token_strs": None}
    assert api.post("/detokenize", {"tokens": tokens}).json() == {"prompt": "h\u00e9!"}
    strings = api.post("/tokenize", {"prompt": [104, 258, 299], "return_token_strs": True}).json()
    assert strings["token_strs"] == ["h", "<|im_end|>", ""]  # 299 is a row of the embedding only


def test_tokenize_gives_what_generation_runs_with():
    api = Api()
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    tokens = api.post("/tokenize", body).json()["tokens"]
    assert api.post("/v1/chat/completions", body).json()["usage"]["prompt_tokens"] == len(tokens)
    ((prompt, _),) = api.backend.requests.values()
    assert prompt == tokens
    closed = api.post("/tokenize", {**body, "add_generation_prompt": False}).json()["tokens"]
    assert tokens[: len(closed)] == closed and len(closed) < len(tokens)


def test_tokenize_counts_what_is_too_long_to_run():
    answer = Api(FakeBackend(max_model_len=10)).post("/tokenize", {"prompt": "x" * 5000}).json()
    assert (answer["count"], answer["max_model_len"]) == (5000, 10)


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": ["a", "b"]}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, 400, "prompt"),
        ("/tokenize", {"prompt": [10**9]}, 400, "prompt"),
        ("/tokenize", {"messages": [{"role": "nobody"}]}, 400, "messages.0.role"),
        ("/tokenize", {"prompt": "a", "return_token_strs": 1}, 400, "return_token_strs"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, 400, "tokens.0"),
        ("/detokenize", {"tokens": [True]}, 400, "tokens.0"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [10**400]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
    ],
)
def test_wrong_tokenize_requests(path, body, status, param):
    assert assert_error(Api().post(path, body), status)["param"] == param
    assert_error(Api().body(b"[]", path), 400, "invalid_json")


def test_detokenizing_many_ids_lets_the_event_loop_run():
    token_ids = list(range(256)) * 1000

    async def count_turns():
        work = asyncio.create_task(asyncio.to_thread(tiny_tokenizer().decode, token_ids))
        turns = 0
        while not work.done():
            await asyncio.sleep(0.001)
            turns += 1
        assert len(await work) > 100_000
        return turns

    tiny_tokenizer()
    # One or two when decoding holds the GIL, in every run; a busy machine may have few in some runs.
    assert any(asyncio.run(count_turns()) > 5 for _ in range(20))


ORIGIN = {"origin": "https://chat.example"}


def test_other_origins_are_not_invited_unless_configured():
    response = Api().get("/v1/models", headers=ORIGIN)
    assert not [name for name in response.headers if name.startswith("access-control")]
    preflight = {**ORIGIN, "access-control-request-method": "POST"}
    assert Api().request("OPTIONS", "/v1/completions", headers=preflight).status_code == 405


def test_configured_origins_may_call_even_when_a_key_is_needed():
    api = Api(cors_origins=("https://chat.example",), keys=KeyDigests(clients=(b"x" * 32,)))
    preflight = {
        **ORIGIN,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    response = api.request("OPTIONS", "/v1/completions", headers=preflight)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "https://chat.example"
    refused = api.get("/v1/models", headers=ORIGIN)
    assert_error(refused, 401)
    assert refused.headers["access-control-allow-origin"] == "https://chat.example"
    stranger = api.get("/v1/models", headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in stranger.headers
