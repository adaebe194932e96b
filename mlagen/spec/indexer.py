"""The lightning indexer, which picks the keys of sparse attention, and the cache of its keys."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from mlagen.layout import LayoutError, indexer_query_layout_of
from mlagen.spec.base import SIZES_ONLY, Model
from mlagen.spec.rules import refused
from mlagen.spec.stored import (
    Cache,
    IndexerLayoutName,
    Layout,
    ScaleRuleChanges,
    named_indexer_layout,
    under_a_name_of_its_own,
)

Rope = Literal["neox", "gptj"]
RopeAt = Literal["first", "last"]


class Candidates(Model):
    """Candidate blocks of keys (DeepSeek V4.1): one layer keeps the best blocks, and later layers pick keys of them."""

    block: Annotated[
        Literal[4, 8, 16, 32, 64], Field(description="neighbouring keys of a block (candidate_block_size)")
    ]
    count: Annotated[
        int, Field(ge=1, le=4096, description=f"blocks kept per query token (candidate_topk_blocks); {SIZES_ONLY}")
    ]


class Indexer(Model):
    """DeepSeek's lightning indexer: `logit = sum over heads of weight * relu(q . k)`. It keeps the `topk` largest.

    RoPE's style has no default: models differ, and the wrong style gives plausible wrong answers.
    """

    num_heads: Annotated[int, Field(ge=1, le=128, description="heads of the indexer's query (index_n_heads)")]
    head_dim: Annotated[int, Field(ge=1, le=512, description="columns of a key (index_head_dim)")]
    topk: Annotated[int, Field(ge=1, le=4096, description=f"keys picked per query token (index_topk); {SIZES_ONLY}")]
    rope_head_dim: Annotated[
        int, Field(ge=0, le=256, multiple_of=2, description="columns of q and k that RoPE rotates; 0 for none")
    ]
    rope: Annotated[
        Rope | None,
        Field(description="pairs of columns that RoPE rotates; neox: i and i + half; gptj: 2i and 2i + 1"),
    ] = None
    rope_at: Annotated[RopeAt | None, Field(description="position of the rotated columns in a head")] = None
    compress_ratio: Annotated[
        int, Field(ge=1, le=128, description=f"tokens per key; 1: each token has a key; {SIZES_ONLY}")
    ] = 1
    candidates: Annotated[
        Candidates | None,
        Field(description="blocks of keys that a first level keeps; leave it out for an indexer of one level"),
    ] = None
    q_scale_rule: Annotated[
        ScaleRuleChanges | None, Field(description="changes to the keys' scale rule, for the query")
    ] = None

    @model_validator(mode="after")
    def _rotates_as_it_says(self) -> Indexer:
        for name in ("rope", "rope_at"):
            said = getattr(self, name)
            if self.rope_head_dim and said is None:
                takes = "neox or gptj" if name == "rope" else "first or last"
                raise refused(f"missing; takes {takes} with rope_head_dim {self.rope_head_dim}", name)
            if not self.rope_head_dim and said is not None:
                raise refused(f"got {said}; takes none with rope_head_dim 0", name)
        if self.rope_head_dim > self.head_dim:
            raise refused(f"got {self.rope_head_dim}; takes at most head_dim, {self.head_dim}", "rope_head_dim")
        return self

    @model_validator(mode="after")
    def _candidates_hold_its_picks(self) -> Indexer:
        if self.candidates is not None and self.candidates.block * self.candidates.count < self.topk:
            keys = f"{self.candidates.count} blocks of {self.candidates.block} keys"
            raise refused(f"got {keys}; takes at least topk, {self.topk} keys", "candidates")
        return self

    @model_serializer(mode="wrap")
    def _without_absent_candidates(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the fields. Specs without candidates keep the digest that they had before the field."""
        fields: dict[str, Any] = handler(self)
        return {name: value for name, value in fields.items() if name != "candidates" or value is not None}


class IndexerCache(Cache):
    """The cache of the indexer's keys: one row of `indexer.head_dim` columns per token, stored after RoPE."""

    layout: Annotated[
        Layout,
        BeforeValidator(named_indexer_layout, json_schema_input_type=IndexerLayoutName | Layout),
        AfterValidator(under_a_name_of_its_own),
        Field(description="layout of a key: a name, or a mapping of fields, with the key as the field of kind row"),
    ]


def check_query(indexer: Indexer, cache: IndexerCache) -> None:
    """Refuse a key layout that indexer.q_scale_rule does not fit."""
    changes = indexer.q_scale_rule
    if changes is None:
        return
    parts = {"indexer": indexer.model_dump(), "indexer_cache": cache.model_dump()}
    try:
        query = indexer_query_layout_of(parts)
    except LayoutError as error:
        message = f"got '{cache.layout.name}', which indexer.q_scale_rule does not fit: {error}"
        raise refused(message, "layout") from None
    if query is not None and changes.model_dump(exclude_none=True) and not query.planar:
        message = (
            f"got '{cache.layout.name}', which has no tile scales; takes a layout with tile scales if "
            f"indexer.q_scale_rule is given"
        )
        raise refused(message, "layout")
