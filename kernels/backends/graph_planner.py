"""Plans what a captured forward reads beside its weights: attention, and linear attention where the model has it."""

from dataclasses import dataclass
from typing import Self, cast

from kernels.attention.base import GraphAttention, GraphForm
from kernels.attention.batch import AttentionBatch
from kernels.backends.select import Backends
from kernels.linear_attention.base import LinearAttention


@dataclass(frozen=True)
class GraphPlanner:
    """The planner of whole steps, or of one ubatch. Methods as of GraphAttention, which has the forms.

    Graphs are captured only where `graph` of both attentions is true, with prompts only where `mixed_graph` is.
    """

    attention: GraphAttention
    linear_attention: LinearAttention | None

    @classmethod
    def of(cls, backends: Backends) -> Self:
        """Return the planner of these backends."""
        return cls(cast(GraphAttention, backends.attention), backends.linear_attention)

    @property
    def captures_prompts(self) -> bool:
        """Whether forwards with prompts can be captured."""
        linear = self.linear_attention
        return self.attention.mixed_graph and (linear is None or linear.mixed_graph)

    def drafts_form(self, num_rows: int) -> GraphForm:
        """See GraphAttention."""
        return self.attention.drafts_form(num_rows)

    def follows(self, num_rows: int) -> bool:
        """See GraphAttention."""
        return self.attention.follows(num_rows)

    def reserve_graphs(self, max_rows: int, max_seqs: int, max_blocks: int) -> None:
        """See GraphAttention."""
        self.attention.reserve_graphs(max_rows, max_seqs, max_blocks)
        if self.linear_attention is not None:
            self.linear_attention.reserve_graphs(max_rows, max_seqs)

    def forms(self, num_rows: int, *, prompts: bool) -> tuple[GraphForm, ...]:
        """See GraphAttention."""
        return self.attention.forms(num_rows, prompts=prompts)

    def form(self, batch: AttentionBatch, num_rows: int, *, prompts: bool) -> GraphForm:
        """See GraphAttention."""
        return self.attention.form(batch, num_rows, prompts=prompts)

    def plan_states(self, num_rows: int, max_seqs: int, *, drafts: bool) -> None:
        """Plan linear attention alone, for sequences that fill a graph: it reads and writes the states of rows.

        Call it before there are sequences, and behind `plan_graph`, of which the attention stays as it is.

        drafts   sequences have as many drafts as they may have, none of them accepted
        """
        linear = self.linear_attention
        if linear is None:
            return
        rows_per_seq, device = 1 + drafts * linear.num_drafts, linear.states[0].state.device
        batch = AttentionBatch.dummy_states(num_rows, rows_per_seq, max_seqs, device)
        linear.plan_graph(batch, num_rows, prompts=False, drafts=drafts)

    def plan_graph(
        self, batch: AttentionBatch, num_rows: int, form: GraphForm, *, prompts: bool
    ) -> None:
        """See GraphAttention. prompts: the graph computes prompts; without, a form of several rows has drafts."""
        self.attention.plan_graph(batch, num_rows, form)
        if self.linear_attention is not None:
            decode_forms = GraphForm.EVEN_DECODES, GraphForm.DECODES, GraphForm.SHARED_DECODES
            drafts = form not in decode_forms and not prompts
            self.linear_attention.plan_graph(batch, num_rows, prompts=prompts, drafts=drafts)
