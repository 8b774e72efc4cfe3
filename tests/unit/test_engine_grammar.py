"""How an engine takes in requests with grammars: it never waits for one to be compiled."""

import threading

from tests.unit.schedulers import make_scheduler
from tests.unit.test_engine import TIMEOUT_S, CountingRunner, ThreadVotes, until
from workers.engine.engine import Engine
from workers.step.step_sync import PlanConfig
from workers.wire.request import EngineRequest, SamplingParams


class FakeGrammar:
    """Complete after so many tokens, or broken after so many."""

    def __init__(self, complete_after: int = 0, broken_after: int = 0):
        self.tokens: list[int] = []
        self.complete = False
        self._complete_after, self._broken_after = complete_after, broken_after

    def advance(self, token_id):
        self.tokens.append(token_id)
        self.complete = len(self.tokens) == self._complete_after
        return "the grammar broke" if len(self.tokens) == self._broken_after else None


class FakeCompiler:
    """Compiles when told to."""

    def __init__(self):
        self.known = {}
        self.waiting = []

    def ready(self, grammar):
        return self.known.get(grammar)

    def compile(self, grammar, done):
        self.waiting.append(done)


class Server:
    """One engine, stepped by hand."""

    def __init__(self, **cache):
        self.compiler = FakeCompiler()
        self.outputs = {}
        self.scheduler = make_scheduler(**cache)
        self.engine = Engine(
            self.scheduler,
            CountingRunner(),
            ThreadVotes(1).transport(0),
            PlanConfig(equal_tokens=False),
            epoch=0,
            publish=self._publish,
            wake_peers=lambda step: None,
            grammars=self.compiler,
        )

    def submit(self, name, grammar=None, max_tokens=3, prompt_tokens=2):
        params = SamplingParams(max_tokens=max_tokens, grammar=grammar)
        prompt = list(range(prompt_tokens))
        self.engine.submit(
            EngineRequest(request_id=name, ingress_id="i", prompt_token_ids=prompt, params=params)
        )

    def step(self, times=1):
        for _ in range(times):
            self.engine.step()

    def tokens(self, name):
        return [token for output in self.outputs.get(name, []) for token in output.token_ids]

    def end(self, name):
        last = self.outputs[name][-1]
        return last.finish_reason, last.error

    def _publish(self, _ingress_id, outputs):
        for output in outputs:
            if output.begins:
                continue
            self.outputs.setdefault(output.request_id, []).append(output)


def test_others_run_while_a_grammar_is_compiled():
    server = Server()
    server.submit("waits", "g", max_tokens=5)
    server.submit("runs")
    server.step(3)
    assert server.tokens("runs") == [2, 3, 4]
    assert not server.tokens("waits")
    server.compiler.waiting[0](FakeGrammar(complete_after=2))
    server.step(3)
    assert server.tokens("waits") == [2, 3]
    assert server.end("waits") == ("stop", None)
    assert not server.scheduler.has_work


def test_a_known_grammar_is_used_at_once():
    server = Server()
    grammar = server.compiler.known["g"] = FakeGrammar()
    server.submit("a", "g")
    server.step(3)
    assert grammar.tokens == server.tokens("a") == [2, 3, 4]
    assert server.end("a") == ("length", None)
    assert not server.compiler.waiting


def test_a_sleeping_engine_wakes_for_a_compiled_grammar():
    server = Server()
    thread = threading.Thread(target=server.engine.run, daemon=True)
    server.submit("a", "g")
    thread.start()
    until(lambda: server.compiler.waiting)
    until(lambda: server.engine.activity()[1] == "sleep")
    server.compiler.waiting[0](FakeGrammar(complete_after=1))
    until(lambda: server.outputs.get("a"))
    assert server.end("a") == ("stop", None)
    server.engine.stop()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


def test_a_grammar_that_cannot_be_compiled_refuses_its_request():
    server = Server()
    server.submit("a", "g")
    server.step()
    server.compiler.waiting[0]("the grammar is wrong")
    server.step()
    assert server.end("a") == ("error", "the grammar is wrong")
    server.submit("a")  # its id is free again
    server.step(3)
    assert server.end("a") == ("length", None)


def test_a_request_aborted_while_its_grammar_is_compiled_never_runs():
    server = Server()
    server.submit("a", "g")
    server.step()
    server.engine.abort("a")
    server.step()
    server.compiler.waiting[0](FakeGrammar())
    server.step(3)
    assert not server.outputs
    assert not server.scheduler.has_work


def test_a_refused_grammar_and_its_abort_may_come_together():
    server = Server()
    server.submit("a", "g")
    server.step()
    server.compiler.waiting[0]("the grammar is wrong")
    server.engine.abort("a")
    server.submit("b")
    server.step(3)
    assert server.tokens("b") == [2, 3, 4]


def test_an_id_that_is_used_again_does_not_get_the_grammar_of_before():
    server = Server()
    server.submit("a", "g")
    server.step()
    server.engine.abort("a")
    server.submit("a", "h", max_tokens=2)
    server.step()
    server.compiler.waiting[0](FakeGrammar(complete_after=1))
    server.step(2)
    assert not server.outputs
    server.compiler.waiting[1](FakeGrammar())
    server.step(2)
    assert server.tokens("a") == [2, 3] and server.end("a") == ("length", None)


def test_a_grammar_that_breaks_ends_its_request_alone():
    server = Server()
    server.compiler.known["g"] = FakeGrammar(broken_after=2)
    server.submit("breaks", "g")
    server.submit("fine")
    server.step(3)
    assert server.tokens("breaks") == [2]
    assert server.end("breaks") == ("error", "the grammar broke")
    assert server.tokens("fine") == [2, 3, 4]
    assert server.scheduler.cache.pool.usage == 0


def test_a_grammar_goes_on_after_preemption():
    server = Server(num_blocks=8)
    grammars = [FakeGrammar() for _ in range(3)]
    for i, grammar in enumerate(grammars):
        server.compiler.known["g"] = grammar
        server.submit(str(i), "g", max_tokens=14, prompt_tokens=6)
        server.step()
    server.step(60)
    assert server.scheduler.num_preemptions > 0
    for i, grammar in enumerate(grammars):
        assert grammar.tokens == server.tokens(str(i)) == list(range(6, 20))
