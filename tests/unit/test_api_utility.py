"""Models, health, metrics, request ids, tokenizer loading."""

import asyncio
import json
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.api.tokenizer import load_default_sampling, load_tokenizer
from cluster.errors import EngineDeadError
from tests.unit.api_fakes import (
    MODEL,
    Api,
    FakeBackend,
    assert_error,
    tiny_checkpoint,
    tiny_tokenizer,
)


def test_models():
    api = Api()
    listed = api.get("/v1/models").json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == (MODEL, "model", 1000)
    assert api.get(f"/v1/models/{MODEL}").json() == model
    assert_error(api.get("/v1/models/other"), 404, "model_not_found")
    assert_error(api.get("/v1/models/"), 404)


def test_health():
    api = Api()
    assert api.get("/health").json()["status"] == "ready"
    api.backend.ready = (False, "rank 1 has not answered for 5 s")
    error = assert_error(api.get("/health"), 503, "engine_unavailable")
    assert "rank 1" in error["message"]


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/nothing", "/v1/completions"])
def test_request_id_is_echoed(path):
    api = Api()
    assert api.get(path, headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    drawn = {api.get(path).headers["x-request-id"] for _ in range(3)}
    assert len(drawn) == 3


@pytest.mark.parametrize("bad", ["", "a b", "a" * 201, "a\u00e9"])
def test_strange_request_ids_are_replaced(bad):
    headers = {"x-request-id": bad.encode("latin-1")}
    echoed = Api().get("/health", headers=headers).headers["x-request-id"]
    assert echoed != bad and len(echoed) == 32


def test_request_id_on_streams_and_same_id_twice():
    api = Api()
    for stream in (True, False, True):
        response = api.request(
            "POST",
            "/v1/completions",
            json={"prompt": "a", "stream": stream},
            headers={"x-request-id": "same"},
        )
        assert response.status_code == 200
        assert response.headers["x-request-id"] == "same"
    assert len(api.backend.requests) == 3


def samples(response):
    """name -> {sorted labels without model_name: value}"""
    result = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name", MODEL) == MODEL
            result.setdefault(sample.name, {})[tuple(sorted(labels.items()))] = sample.value
    return result


def test_rank_metrics():
    api = Api()
    api.backend.stats = [
        {
            "running": rank,
            "waiting": 2,
            "kv_cache_usage": 0.5,
            "preemptions": 3,
            "prompt_tokens": 100,
            "generation_tokens": 50 + rank,
            "padding_tokens": 7,
            "steps": 40,
            "idle_steps": 4,
            "step_seconds": {"forward": 1.5, "vote": 0.25},
        }
        for rank in range(2)
    ]
    found = samples(api.get("/metrics"))
    one = (("rank", "1"),)
    assert found["phalanx:num_requests_running"] == {(("rank", "0"),): 0, one: 1}
    assert found["phalanx:num_requests_waiting"][one] == 2
    assert found["phalanx:kv_cache_usage_perc"][one] == 0.5
    assert found["phalanx:num_preemptions_total"][one] == 3
    assert found["phalanx:prompt_tokens_total"][one] == 100
    assert found["phalanx:generation_tokens_total"][one] == 51
    assert found["phalanx:padding_tokens_total"][one] == 7
    assert found["phalanx:steps_total"][one] == 40
    assert found["phalanx:idle_steps_total"][one] == 4
    parts = found["phalanx:step_time_seconds_total"]
    assert parts[(("part", "forward"), ("rank", "1"))] == 1.5
    assert len(parts) == 4


def test_request_metrics():
    api, started = Api(FakeBackend("hello")), time.perf_counter()
    api.complete("abc", max_tokens=4, n=2)
    api.complete("abc", stop="e")
    api.complete("abc", max_tokens=0)
    api.backend.fail_before = EngineDeadError("gone")
    api.complete("abc")
    seconds = time.perf_counter() - started
    response = api.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    found = samples(response)
    ended = found["phalanx:request_success_total"]
    assert ended == {
        (("finished_reason", "length"),): 2,
        (("finished_reason", "stop"),): 1,
        (("finished_reason", "error"),): 1,
    }
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert found[f"phalanx:{name}_count"][()] == 3
        assert 0 < found[f"phalanx:{name}_sum"][()] < 2 * seconds, "two answers came at once"
    assert found["phalanx:request_prompt_tokens_sum"][()] == 9
    assert found["phalanx:request_generation_tokens_sum"][()] == 10
    http = found["phalanx:http_requests_total"]
    by_status = {dict(labels)["status"]: value for labels, value in http.items()}
    assert by_status == {"200": 2, "400": 1, "503": 1}
    assert {dict(labels)["handler"] for labels in http} == {"/v1/completions"}


def test_metrics_without_the_ranks():
    class Silent(FakeBackend):
        async def rank_stats(self):
            await asyncio.Event().wait()

    response = Api(Silent(), stats_timeout_s=0.01).get("/metrics")
    assert response.status_code == 200
    assert "phalanx:num_requests_running{" not in response.text


def test_two_applications_in_one_process_keep_apart():
    first, second = Api(), Api()
    first.complete()
    assert "phalanx:request_success_total{" in first.get("/metrics").text
    assert "phalanx:request_success_total{" not in second.get("/metrics").text


def test_openapi_document_names_the_fields():
    document = Api().get("/openapi.json").json()
    schema = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]
    fields = schema["application/json"]["schema"]["properties"]
    assert {"prompt", "max_tokens", "temperature", "stop", "stream"} <= fields.keys()


def test_loading_reads_end_tokens_vocabulary_and_sampling_defaults(tmp_path):
    folder = tiny_checkpoint(tmp_path / "tiny")
    generation = {"eos_token_id": 5, "temperature": 0.6, "top_k": 20, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_token_ids == {5, 258}  # the generation's and the tokenizer's own
    assert tokenizer.vocab_size == 300
    assert load_default_sampling(folder) == {"temperature": 0.6, "top_k": 20}
    (folder / "generation_config.json").unlink()
    assert load_tokenizer(folder).eos_token_ids == {258}
    assert load_default_sampling(folder) == {}


def test_tokenising_a_long_prompt_lets_the_event_loop_run():
    async def count_turns():
        work = asyncio.create_task(asyncio.to_thread(encode))
        turns = 0
        while not work.done():
            await asyncio.sleep(0.005)
            turns += 1
        return len(await work), turns

    def encode():
        return tiny_tokenizer().encode("hello " * 200_000, add_special_tokens=True)

    length, turns = asyncio.run(count_turns())
    assert length == 1_200_000
    assert turns > 5  # one or two when the tokenizer holds the GIL


def test_truncation_in_the_tokenizer_file_does_not_cut_prompts(tmp_path):
    from tokenizers import Tokenizer

    folder = tiny_checkpoint(tmp_path / "tiny")
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(8)
    backend.enable_padding(length=8)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    assert len(tokenizer.encode("x" * 50, add_special_tokens=True)) == 50
    assert len(tokenizer.encode("x", add_special_tokens=True)) == 1
