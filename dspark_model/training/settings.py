"""Typed settings of text generation, drafter shape and training; `scripts/train_drafter.py` has a flag for each
field."""

from dataclasses import dataclass

from dspark_model.config import DrafterConfig

DECODE_ATTENTIONS = ("triton", "sdpa")
SAMPLERS = ("triton", "torch")
BLOCK_ATTENTIONS = ("dense", "flex", "triton")
LOSS_KERNELS = ("triton", "torch")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, wanted one of {', '.join(choices)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """How the target writes the training text.

    `chat_share`: share of chat-like user turns among those that the target writes itself; `prompt_share`: share of
    conversations that open with a given prompt, `prefix_share`: with the first tokens of one; `two_turn_share`: share
    with a second exchange.  Greedy answers are `greedy_share` of all, half of the rest each at temperature 0.5 and 1.
    `check_every`: steps between two looks of the host at the slots.  `ngram`: length of a shared run of tokens that
    counts as overlap with an excluded prompt.
    """

    slots: int = 4096
    sequence_length: int = 576
    max_prompt_tokens: int = 230
    max_user_tokens: int = 160
    max_answer_tokens: int = 300
    greedy_share: float = 0.85
    chat_share: float = 0.30
    prompt_share: float = 0.03
    prefix_share: float = 0.12
    two_turn_share: float = 0.08
    check_every: int = 16
    seconds: float = 120.0
    max_sequences: int = 1_000_000
    ngram: int = 10
    seed: int = 0
    decode_attention: str = "triton"
    sampler: str = "triton"
    cuda_graph: bool = True
    compile_target: bool = False

    def __post_init__(self):
        _check_choice("decode_attention", self.decode_attention, DECODE_ATTENTIONS)
        _check_choice("sampler", self.sampler, SAMPLERS)
        longest = self.max_prompt_tokens + 32
        if self.sequence_length < longest:
            raise ValueError(
                f"sequence_length is {self.sequence_length}, wanted at least {longest}: a prompt of "
                f"{self.max_prompt_tokens} tokens (max_prompt_tokens) and an answer must fit"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterShape:
    """Sizes of a new drafter; hidden size, vocabulary, positions and taps come from the target unless `taps` is
    given."""

    layers: int = 4
    heads: int = 9
    q_lora_rank: int = 384
    kv_lora_rank: int = 256
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 32
    v_head_dim: int = 64
    intermediate_size: int = 1440
    markov_rank: int = 64
    rope_theta: float = 10000.0
    taps: tuple[int, ...] | None = None

    def to_config(
        self,
        *,
        hidden_size: int,
        vocab_size: int,
        num_layers: int,
        max_position_embeddings: int,
        eps: float,
        drafts: int,
    ) -> DrafterConfig:
        """The config of a drafter of this shape for a target with the given facts."""
        return DrafterConfig.from_dict(
            {
                "model_type": "mla_dspark",
                "hidden_size": hidden_size,
                "intermediate_size": self.intermediate_size,
                "num_hidden_layers": self.layers,
                "num_attention_heads": self.heads,
                "q_lora_rank": self.q_lora_rank,
                "kv_lora_rank": self.kv_lora_rank,
                "qk_nope_head_dim": self.qk_nope_head_dim,
                "qk_rope_head_dim": self.qk_rope_head_dim,
                "v_head_dim": self.v_head_dim,
                "vocab_size": vocab_size,
                "rms_norm_eps": eps,
                "max_position_embeddings": max_position_embeddings,
                "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
                "target_layer_ids": list(self.taps if self.taps is not None else default_taps(num_layers)),
                "target_hidden_size": hidden_size,
                "target_num_hidden_layers": num_layers,
                "mask_token_id": 0,
                "mask_embedding": True,
                "block_size": drafts,
                "markov_rank": self.markov_rank,
                "enable_confidence_head": True,
                "confidence_head_with_markov": True,
                "sample_from_anchor": True,
                "dtype": "float32",
            }
        )


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Five layers spread evenly from layer 2 to the last but one, 0-based: (2, 8, 15, 22, 28) of 30."""
    first, last = min(2, num_layers - 1), max(num_layers - 2, min(2, num_layers - 1))
    return tuple(sorted({round(first + (last - first) * i / 4) for i in range(5)}))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """How the drafter is trained.

    One step takes `rows` packed rows of `row_tokens` tokens and `anchors` random anchors in each, `drafts` block rows
    an anchor.  The learning rate warms up over `warmup_steps`, then falls as a cosine of the progress (training
    seconds of `seconds_total`, or steps of `steps` where that is given) to `final_lr_share`.  `vocab_chunk_rows`:
    packed rows whose logits exist at the same time.
    """

    rows: int = 16
    row_tokens: int = 576
    anchors: int = 256
    drafts: int = 7
    gamma: float = 4.0
    ce_weight: float = 0.1
    l1_weight: float = 0.9
    confidence_weight: float = 1.0
    lr_matrix: float = 3e-3
    lr_other: float = 3e-3
    weight_decay: float = 0.0
    markov_init_std: float = 0.1
    warmup_steps: int = 100
    final_lr_share: float = 0.02
    seconds_total: float | None = 1200.0
    steps: int | None = None
    vocab_chunk_rows: int = 4
    attention: str = "dense"
    loss_kernel: str = "triton"
    compile_drafter: bool = False
    compile_target: bool = False
    log_every: int = 20
    eval_every_seconds: float = 60.0
    eval_sequences: int = 64
    save_every_seconds: float = 180.0
    seed: int = 0

    def __post_init__(self):
        _check_choice("attention", self.attention, BLOCK_ATTENTIONS)
        _check_choice("loss_kernel", self.loss_kernel, LOSS_KERNELS)
        if (self.seconds_total is None) == (self.steps is None):
            raise ValueError(
                f"seconds_total is {self.seconds_total} and steps {self.steps}; give exactly one of the two budgets"
            )
        if self.rows % self.vocab_chunk_rows:
            raise ValueError(f"rows is {self.rows}, wanted a multiple of vocab_chunk_rows ({self.vocab_chunk_rows})")
