"""What /metrics and /ranks say of given counters."""

import asyncio

from tests.unit.api_fakes import Api, assert_error


def test_ranks_as_json():
    api = Api()
    api.backend.stats = [
        {"rank": 0, "running": 3, "generation_tokens": 70, "step_seconds": {"forward": 1.5}},
        {"rank": 1, "waiting": 2, "kv_cache_usage": 0.25, "secret": "not shown"},
    ]
    answer = api.get("/ranks").json()
    assert answer["model"] == "tiny/model" and answer["time"] > 1e9
    zero, one = answer["ranks"]
    assert (zero["rank"], zero["running"], zero["generation_tokens"]) == (0, 3, 70)
    assert zero["step_seconds"] == {"forward": 1.5}
    assert (one["rank"], one["waiting"], one["kv_cache_usage"], one["steps"]) == (1, 2, 0.25, 0)
    assert zero.keys() == one.keys() and "secret" not in one


def test_ranks_that_do_not_answer_are_a_503():
    api = Api(stats_timeout_s=0.01)

    async def silent():
        await asyncio.Event().wait()

    api.backend.rank_stats = silent
    assert_error(api.get("/ranks"), 503, "engine_unavailable")
