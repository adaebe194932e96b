"""The lightning indexer: the small attention that picks the keys of sparse attention, and the cache of its keys."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from mlagen.layout import LayoutError, indexer_query_layout_of
from mlagen.spec.base import Model
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


class Indexer(Model):
    """DeepSeek's lightning indexer: `logit = sum over heads of weight * relu(q . k)`, of which the `topk` largest stay.

    How it rotates has no default: models differ, and the wrong style gives plausible wrong answers.
    """

    num_heads: Annotated[int, Field(ge=1, le=128, description="heads of its query (index_n_heads)")]
    head_dim: Annotated[int, Field(ge=1, le=512, description="columns of a key (index_head_dim)")]
    topk: Annotated[int, Field(ge=1, le=4096, description="keys that it picks for a query token (index_topk)")]
    rope_head_dim: Annotated[
        int, Field(ge=0, le=256, multiple_of=2, description="columns of q and k that RoPE rotates; 0: none")
    ]
    rope: Annotated[
        Rope | None,
        Field(description="which columns RoPE rotates together; neox: i and i + half; gptj: 2i and 2i + 1"),
    ] = None
    rope_at: Annotated[RopeAt | None, Field(description="where the rotated columns stand in a head")] = None
    compress_ratio: Annotated[
        int, Field(ge=1, le=128, description="tokens a key stands for; 1: each token has a key")
    ] = 1
    q_scale_rule: Annotated[
        ScaleRuleChanges | None, Field(description="what of the keys' scale rule the query's scales do otherwise")
    ] = None

    @model_validator(mode="after")
    def _rotates_as_it_says(self) -> Indexer:
        for name in ("rope", "rope_at"):
            said = getattr(self, name)
            if self.rope_head_dim and said is None:
                takes = "neox or gptj" if name == "rope" else "first or last"
                raise refused(f"is missing; takes {takes} with rope_head_dim {self.rope_head_dim}", name)
            if not self.rope_head_dim and said is not None:
                raise refused(f"got {said}; takes none with rope_head_dim 0", name)
        if self.rope_head_dim > self.head_dim:
            raise refused(f"got {self.rope_head_dim}; takes at most head_dim, {self.head_dim}", "rope_head_dim")
        return self


class IndexerCache(Cache):
    """The cache of the indexer's keys: one row of `indexer.head_dim` columns a token, which is rotated already."""

    layout: Annotated[
        Layout,
        BeforeValidator(named_indexer_layout, json_schema_input_type=IndexerLayoutName | Layout),
        AfterValidator(under_a_name_of_its_own),
        Field(description="how a key is stored: a name, or a mapping of fields, of which the key is the row"),
    ]


def check_query(indexer: Indexer, cache: IndexerCache) -> None:
    """Refuses keys whose scales cannot follow the rule of the query's."""
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
        message = f"got '{cache.layout.name}', which has no scales a tile; takes one that has, for indexer.q_scale_rule"
        raise refused(message, "layout")
