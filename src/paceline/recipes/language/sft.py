"""Fine-tune a causal language model: ``paceline train sft``,
``torchrun -m paceline.recipes.language.sft``, or alone.

The training is in :func:`train_sft`, from top to bottom; its parts are imported.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from paceline import train
from paceline.recipes import common
from paceline.recipes.data import find_data
from paceline.recipes.data.texts import split_seeded
from paceline.recipes.language.adapters import (
    TrainedPart,
    add_adapters,
    checkpoint_gradients,
    place,
)
from paceline.recipes.language.base_model import BaseModel, content_hash, settings_hash
from paceline.recipes.language.base_quantization import (
    check_quantization,
    num_weights,
    quantize_base,
)
from paceline.recipes.language.chat_templates import Render, plain_render, template_render
from paceline.recipes.language.conversations import Conversation, Format, Preference
from paceline.recipes.language.examples import (
    Encoder,
    ExampleSet,
    PairSet,
    parse_preferences,
    parse_records,
    show_example,
)
from paceline.recipes.language.memory import (
    Change,
    MemoryNeeds,
    base_needs,
    check_memory,
    examples_at_once,
)
from paceline.recipes.language.objectives import Objective, PreferenceLoss, TokenLoss
from paceline.recipes.language.options import SftOptions
from paceline.recipes.language.records import read_file, read_splits
from paceline.recipes.language.references import Reference, without_adapters
from paceline.recipes.language.rows import with_micro_batch
from paceline.recipes.optimization import make_optimizer
from paceline.spec import rundir
from paceline.spec.errors import DataError
from paceline.spec.formatting import pluralize
from paceline.spec.schema import MAX_LONG_TEXT, list_of, text
from paceline.train import Best, files
from paceline.train.comms import parse_texts

ADAPTERS = "adapters"
"""Folder with ``best`` and ``last``: each in the format of peft, or that of transformers if the
whole model is trained."""
SAMPLES = "samples.jsonl"
"""Latest generated answers: prompt, expected, generated."""
EVALUATION_BATCH = 8


def train_sft(options: SftOptions) -> None:
    """Runs one training; called on every rank."""
    data = load_conversations(options)
    options = common.with_fast_dtype(options, large=True)
    options = replace(options, lr=options.lr or default_lr(options))
    base = BaseModel(options.model, options.offline)
    with common.join("sft", options) as session:
        common.agree_on_precision(session, options)
        if options.method == "qlora":
            session.together(lambda: check_quantization(session.device))
        session.together(base.check_no_run)
        tokenizer = session.together(base.load_tokenizer)
        encoder = session.together(lambda: make_encoder(tokenizer, options))
        training, held_out = session.together(lambda: encode_parts(encoder, data, options))
        session.agree("the examples", training.fingerprint() + held_out.fingerprint())
        session.say(f"{data.source} is in the {data.format} format:")
        session.say(show(tokenizer, training, options.show_examples or 1))
        session.say(training.describe("training"))
        session.say(held_out.describe(data.held_out))
        if options.show_examples:
            return
        save_tokenizer(session, tokenizer, options)

        options, lengths = with_micro_batch(options, max(training.lengths())), training.lengths()
        batching = common.make_batching(session, options)
        model = session.together(base.outline)
        needs = memory_needs(session, options, model, training)
        needs = replace(needs, examples=examples_at_once(options, batching))
        check_memory(session, needs, memory_changes(session, options, needs, model))
        if model.device.type == "meta":
            model = session.together(base.load)
        add_end_tokens(model, encoder.end_tokens())
        base_hash, base_settings = content_hash(model), settings_hash(model)
        session.agree("the content of the base model", base_hash)
        session.agree("the settings of the base model", base_settings)
        size = model.get_input_embeddings().num_embeddings
        window = getattr(model.config, "max_position_embeddings", None) or 0
        session.together(lambda: training.check_fit(size, window, tokenizer))
        session.together(lambda: held_out.check_fit(size, window, tokenizer))
        loader = common.make_loader(session, options, training, batching, lengths)

        if options.method == "qlora":
            model, base_settings = quantize_base(model, session.device), f"{base_settings} nf4"
        adapted = add_adapters(model, options.method, options.lora_rank, options.lora_alpha)
        placed = place(adapted, session.device, session.precision, options.method)
        if options.gradient_checkpointing:
            checkpoint_gradients(placed, options.method)
        network = TrainedPart(placed).train()
        if training.capacity and not keeps_apart(network, training):
            training.capacity = held_out.capacity = 0
            session.say("this model mixes examples of a row: each gets its own, as with --no-pack")
        reference = Reference(base_hash, base_settings, partial(without_adapters, network))
        at_once = min(EVALUATION_BATCH, batching.limit or EVALUATION_BATCH)
        objective = make_objective(session, options, training, reference, "training", at_once)
        measure = make_objective(session, options, held_out, reference, data.held_out, at_once)
        session.say(describe_training(network))
        optimizer = make_optimizer(options, network, batching.lr)
        curve = common.make_curve(options, loader)
        schedule = LambdaLR(optimizer, curve)
        module = common.prepare(session, options, network, optimizer, schedule)

        def forward(batch: train.Batch) -> Tensor:
            tokens, positions, *_ = batch
            with session.autocast():
                return module(tokens, positions)  # type: ignore[no-any-return]

        def compute(batch: train.Batch) -> tuple[Tensor, dict[str, Tensor]]:
            return objective.losses(forward(batch), batch, loader)

        def compute_alone(batch: train.Batch) -> tuple[Tensor, dict[str, Tensor]]:
            return objective.losses(forward(batch), batch, None)

        if common.run_trials(session, options, loader, compute_alone, lengths):
            return
        best = Best(higher=False, patience=options.patience)
        metadata = describe(options, data, reference, is_packed=training.capacity > 0)
        common.configure_checkpoints(
            session, options, best, training.fingerprint(), metadata,
            base=base_hash, method=options.method, rank=options.lora_rank, alpha=options.lora_alpha,
            **objective_identity(options), **template_identity(encoder, data),
        )  # fmt: skip
        prompts = make_prompts(encoder, data, options)
        is_full, figures = options.method == "full", dict[str, float]()
        for _ in common.epochs(session, loader, options, curve, schedule, best):
            for batch in loader:
                losses, values = compute(batch)
                session.step(losses, **values)
            with session.averaged():
                figures = evaluate(session, network, held_out, measure, at_once)
                session.log(data.held_out, samples=len(held_out), **figures)
                if best.update(figures["loss"], session.progress.step) and not is_full:
                    save_adapter(session, network, "best")
                answer(session, network, tokenizer, prompts, options.sample_tokens)
            curve.report(figures["loss"])
            common.stop_early(session, options, best, "held-out loss", figures["loss"])

        with session.averaged():  # a resumed run that had finished has no evaluation yet
            figures = figures or evaluate(session, network, held_out, measure, at_once)
            save_adapter(session, network, "last")
        measured = {"samples": len(held_out), **figures}
        session.save_model({**metadata, "metrics": {data.held_out: measured}}, average=True)
        noun = "pair" if options.objective == "dpo" else "example"
        count = pluralize(len(held_out), f"{data.held_out} {noun}")
        session.say(f"{summary(figures)}  ({count})")


@dataclass(frozen=True)
class ChatData:
    """Conversations or preferences by part: ``train``, and ``val`` or ``test``.

    Attributes:
        errors: Why rows were left out, by part.
        split: How the parts were made.
    """

    source: str
    format: Format
    splits: dict[str, list[Conversation | Preference]]
    errors: dict[str, list[DataError]]
    split: dict[str, str | int | float]

    @property
    def held_out(self) -> str:
        """Name of the part for evaluation."""
        return "val" if "val" in self.splits else "test"

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash over content and parts."""
        digest = hashlib.sha256()
        for part, rows in sorted(self.splits.items()):
            digest.update(part.encode())
            for row in rows:
                pair = (row.chosen, row.rejected) if isinstance(row, Preference) else (row,)
                for conversation in pair:
                    turns = [(m.role, m.content, m.is_target) for m in conversation.messages]
                    digest.update(json.dumps([conversation.text, turns]).encode())
        return digest.hexdigest()[:16]


def load_conversations(options: SftOptions) -> ChatData:
    """Reads the data; DataError names file and row."""
    name = options.data
    parts = read_splits(name, options.data_dir, options.data_config, options.offline)
    if options.test_data:
        file = find_data(options.test_data, options.data_dir)
        parts["test"] = [*read_file(file, options.test_data)]
    for part, records in parts.items():
        if not records:
            source = options.test_data if part == "test" else ""
            raise DataError(f"{source or name} has no rows for {part}", remedy="add at least one")
    parse: Any = parse_preferences if options.objective == "dpo" else parse_records
    parsed = {
        part: parse(records, skip_damaged=options.skip_damaged) for part, records in parts.items()
    }
    splits = {part: rows for part, (_, rows, _) in parsed.items()}
    errors = {part: part_errors for part, (_, _, part_errors) in parsed.items()}
    split_info: dict[str, str | int | float] = {"method": "as in the files"}
    if set(splits) == {"train"}:
        fraction, seed = options.val_fraction, options.seed
        splits = split_seeded(splits["train"], fraction, seed)
        split_info = {"method": "seeded", "seed": seed, "val_fraction": fraction}
    return ChatData(name, parsed["train"][0], splits, errors, split_info)


def make_encoder(tokenizer: Any, options: SftOptions) -> Encoder:
    """Returns what turns conversations into tokens.

    Raises:
        DataError: The template file cannot be read.
    """
    has_template = options.chat_template != "none"
    render: Render = plain_render
    if has_template:
        template = load_template(options)
        tokenizer.chat_template = template or tokenizer.chat_template
        render = template_render(tokenizer)
    return Encoder(
        tokenizer, render, has_template, options.system, options.max_length, options.too_long
    )


def load_template(options: SftOptions) -> str:
    """Returns the content of the template file; empty if none is named."""
    if not options.chat_template:
        return ""
    try:
        path = find_data(options.chat_template, options.data_dir)
        return files.read_bytes_limited(path).decode()
    except (OSError, ValueError) as error:
        raise DataError(
            f"--chat-template {options.chat_template} cannot be read", found=str(error)
        ) from None


def encode_parts(
    encoder: Encoder, data: ChatData, options: SftOptions
) -> tuple[ExampleSet, ExampleSet]:
    """Returns the examples for training, and those for evaluation.

    Raises:
        DataError: No example is held out, the model has no chat template, or an example cannot be
            trained on.
    """
    if not data.splits[data.held_out]:
        raise DataError(
            f"--data {data.source} has a single example",
            found="it is trained on, and none is left to hold out",
            remedy="add a second one, or --test-data FILE names examples to hold out",
        )
    row = data.splits["train"][0]
    first = row.chosen if isinstance(row, Preference) else row
    if first.messages and encoder.has_template and not encoder.tokenizer.chat_template:
        alternative = ", or none, which joins prompt and completion as they are"
        alternative = alternative if len(first.messages) == 2 else ""
        raise DataError(
            f"--model {options.model} has no chat template",
            found=f"the data are in the {data.format} format",
            remedy=f"--chat-template FILE with a template{alternative}",
        )

    training, held_out = (
        encode_conversations(encoder, data, part, options) for part in ("train", data.held_out)
    )
    return training, held_out


def encode_conversations(
    encoder: Encoder, data: ChatData, part: str, options: SftOptions
) -> ExampleSet:
    """Returns the examples of a part of the data."""
    encode: Any = encoder.encode_pairs if options.objective == "dpo" else encoder.encode
    examples: ExampleSet = encode(data.splits[part], skip_damaged=options.skip_damaged)
    examples.errors = [*data.errors.get(part, ()), *examples.errors]
    is_packed = options.pack and not isinstance(examples, PairSet)
    examples.capacity = options.max_length if is_packed else 0
    return examples


def show(tokenizer: Any, training: ExampleSet, count: int) -> str:
    """Returns the first examples as they are trained on."""
    decode = partial(tokenizer.decode, skip_special_tokens=False)
    count *= len(training.examples) // len(training)  # both examples of a pair
    return "\n".join(show_example(example, decode) for example in training.examples[:count])


def save_tokenizer(session: train.Session, tokenizer: Any, options: SftOptions) -> None:
    """Saves the tokenizer and its chat template with the run."""
    session.keep(
        rundir.MODEL,
        lambda folder: tokenizer.save_pretrained(
            str(folder / rundir.MODEL), save_jinja_files=False
        ),
    )


def default_lr(options: SftOptions) -> float:
    """Returns the learning rate if none is set.

    Adapters take ten times the rate of the whole model, or more (Schulman et al. 2025). DPO moves
    a model that is already trained: its rates are those of trl's examples.
    """
    if options.objective == "dpo":
        return 5e-7 if options.method == "full" else 5e-6
    return 2e-5 if options.method == "full" else 2e-4


def objective_identity(options: SftOptions) -> dict[str, Any]:
    """Returns what identifies an objective beside next-token prediction."""
    return {"objective": "dpo", "dpo_beta": options.dpo_beta} if options.objective == "dpo" else {}


def template_identity(encoder: Encoder, data: ChatData) -> dict[str, str]:
    """Returns what identifies the chat template, if the training data need one."""
    rows = data.splits["train"]
    conversations = (row.chosen if isinstance(row, Preference) else row for row in rows)
    if not any(conversation.messages for conversation in conversations):
        return {}
    template = f"{encoder.tokenizer.chat_template}" if encoder.has_template else ""
    name = hashlib.sha256(template.encode()).hexdigest()[:16] if encoder.has_template else "none"
    return {"chat_template": name}


def make_objective(
    session: train.Session,
    options: SftOptions,
    examples: ExampleSet,
    reference: Reference,
    name: str,
    at_once: int,
) -> Objective:
    """Returns the objective for a part of the data, whose name is ``name``; a collective."""
    if isinstance(examples, PairSet):
        losses = reference.losses(session, examples, name, at_once)
        return PreferenceLoss(losses, options.dpo_beta)
    return TokenLoss(examples.targets)


def memory_needs(
    session: train.Session, options: SftOptions, model: Any, training: ExampleSet
) -> MemoryNeeds:
    """Returns what the memory of a process depends on, with one example at once.

    Args:
        model: The base, also without weights.
    """
    lengths = training.lengths()
    return replace(
        base_needs(model, options.method, options.lora_rank, session.precision, session.device),
        length=sum(lengths) / len(lengths),
        longest=max(lengths),
        target_part=float(training.targets.sum()) / sum(lengths),
        is_checkpointed=options.gradient_checkpointing,
    )


def memory_changes(
    session: train.Session, options: SftOptions, needs: MemoryNeeds, model: Any
) -> dict[str, Change]:
    """Returns what other flags would change in the needs, by flags."""
    changes: dict[str, Change] = {}
    if session.device.type != "cpu" and session.precision.compute is None:
        is_kept = options.method in ("full", "qlora")
        frozen_bytes = needs.frozen_bytes if is_kept else 2
        changes["--dtype bf16"] = partial(replace, number_bytes=2, frozen_bytes=frozen_bytes)
    if not needs.is_checkpointed:
        changes["--gradient-checkpointing"] = partial(replace, is_checkpointed=True)
    if options.method == "full":
        lora = base_needs(model, "lora", options.lora_rank, session.precision, session.device)
        sizes = {"parameters": lora.parameters, "trained": lora.trained}
        changes["--method lora"] = partial(replace, **sizes)
    if (
        session.device.type == "cuda"
        and options.method == "lora"
        and importlib.util.find_spec("bitsandbytes")
    ):
        quantized = base_needs(model, "qlora", options.lora_rank, session.precision, session.device)
        changes["--method qlora"] = partial(replace, frozen_bytes=quantized.frozen_bytes)
    if (half := needs.longest // 2) > 1:
        cut = partial(replace, longest=half, length=min(needs.length, half))
        changes[f"--max-length {half} --too-long cut"] = cut
    return changes


def describe_training(network: TrainedPart) -> str:
    """Describes in a line what is trained, and what crosses the network for it."""
    trained = sum(p.numel() for p in network.parameters())
    total = sum(num_weights(p) for p in network.whole_model.parameters())
    size = sum(p.numel() * p.element_size() for p in network.parameters())
    return (
        f"training {trained:,} of {total:,} parameters ({trained / total:.1%}):"
        f" gradients of {size / 1e6:,.1f} MB a step, before --communication"
    )


@torch.no_grad()
def keeps_apart(network: TrainedPart, training: ExampleSet) -> bool:
    """Tells whether the network computes an example as if no other stood before it in its row."""
    network.eval()
    device = next(network.parameters()).device
    first, second = (
        torch.from_numpy(training.examples[n].tokens[:8]).to(device)[None] for n in (0, -1)
    )
    both, start = torch.cat([first, second], 1), first.shape[1]
    alone = network(second, torch.arange(second.shape[1], device=device)[None])
    counting = torch.arange(both.shape[1], device=device)[None]
    joined = network(both, counting)[:, start:]
    packed = network(both, torch.where(counting < start, counting, counting - start))[:, start:]
    network.train()
    # Rounding is little, compared with what a text changes that is seen.
    return bool((packed - alone).abs().max() < 0.1 * (joined - alone).abs().max())


@torch.no_grad()
def evaluate(
    session: train.Session,
    network: TrainedPart,
    held_out: ExampleSet,
    objective: Objective,
    at_once: int = EVALUATION_BATCH,
) -> dict[str, float]:
    """Returns the figures of an objective over every example once, on every rank.

    Args:
        at_once: Examples that a process computes at once.
    """
    session.phase("evaluate")
    network.eval()
    meter = session.meter()
    for batch in session.shard(held_out, at_once):
        tokens, positions, *_ = batch
        with session.autocast():
            logits = network(tokens, positions)
        meter.add(batch.count, **objective.measure(logits, batch))
    network.train()
    return objective.figures(meter.result().sums, len(held_out))


def summary(figures: dict[str, float]) -> str:
    """Formats the figures of an evaluation in one line."""
    if "reward_accuracy" in figures:
        return (
            f"loss {figures['loss']:.4f}  reward accuracy {figures['reward_accuracy']:.1%}"
            f"  reward margin {figures['reward_margin']:.4f}"
        )
    return f"loss {figures['loss']:.4f}  perplexity {figures['perplexity']:.2f}"


@dataclass(frozen=True)
class Prompt:
    """The beginning of a held-out conversation, and the answer that follows."""

    text: str
    tokens: list[int]
    expected: str


def make_prompts(encoder: Encoder, data: ChatData, options: SftOptions) -> list[Prompt]:
    """Returns held-out conversations up to their last trained answer; none for plain texts."""
    prompts = []
    for row in data.splits[data.held_out][: options.samples]:
        conversation = row.chosen if isinstance(row, Preference) else row
        if conversation.messages:
            messages = conversation.messages
            number = max(n for n, message in enumerate(messages) if message.is_target)
            prompts.append(
                Prompt(*encoder.encode_prompt(messages[:number]), messages[number].content)
            )
    return prompts


@torch.no_grad()
def answer(
    session: train.Session,
    network: TrainedPart,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    max_tokens: int,
) -> None:
    """Generates an answer to each prompt, each on one rank; shows and saves all.

    Answers that a request to stop cuts short are dropped.
    """
    if not prompts:
        return
    session.phase("generate")
    network.eval()
    size, rank = session.world.size, session.world.rank
    answers = [
        generate(
            network.whole_model,
            tokenizer,
            prompt.tokens,
            max_tokens,
            lambda: session.stop_requested,
        )
        if n % size == rank and num_free(network.whole_model, prompt.tokens) > 0
        else ""
        for n, prompt in enumerate(prompts)
    ]
    network.train()
    if session.comms.max(torch.tensor([float(session.stop_requested)]))[0] > 0:
        return
    shape = list_of(text(MAX_LONG_TEXT), len(prompts))
    by_rank = parse_texts(session.comms.texts(json.dumps(answers)), shape)
    records = [
        {
            "prompt": prompt.text,
            "expected": prompt.expected,
            "generated": next((part[n] for part in by_rank if part[n]), ""),
        }
        for n, prompt in enumerate(prompts)
    ]
    content = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    session.keep(SAMPLES, lambda folder: files.write_bytes(folder / SAMPLES, content.encode()))
    for record in records:
        lines = (f"  {name:<10} {' '.join(value.split())}" for name, value in record.items())
        session.say("\n".join(lines))


def num_free(model: Any, prompt: Sequence[int]) -> int:
    """Returns how many tokens a model can read after a prompt."""
    window = getattr(model.config, "max_position_embeddings", None) or sys.maxsize
    return window - len(prompt)


def add_end_tokens(model: Any, ends: Sequence[int]) -> None:
    """Lets a model also stop at these tokens, here and in what is saved of it."""
    config = model.generation_config
    eos_ids = config.eos_token_id
    eos_ids = [] if eos_ids is None else eos_ids if isinstance(eos_ids, list) else [eos_ids]
    config.eos_token_id = sorted({*eos_ids, *ends}) or None


def generate(
    model: Any, tokenizer: Any, prompt: Sequence[int], max_tokens: int,
    must_end: Callable[[], bool] = lambda: False, streamer: Any = None, **choice: Any,
) -> str:  # fmt: skip
    """Returns a continuation of a prompt: the most probable token at each place.

    Of the model's own settings for it, only the tokens at which it stops are used.

    Args:
        must_end: Called after each token; true ends the text there.
        streamer: Gets the tokens as they are written, as ``generate`` of transformers takes it.
        choice: Other ways to choose, as ``GenerationConfig`` of transformers takes them.
    """
    tokens = torch.tensor([[*prompt]], device=model.device)
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    generation = base.generation_config
    # What a given configuration leaves open, transformers takes from the model's.
    base.generation_config = type(generation)(
        max_new_tokens=min(max_tokens, num_free(model, prompt)),
        eos_token_id=generation.eos_token_id,
        pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
        **choice,
    )
    try:
        output = model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            generation_config=base.generation_config,
            stopping_criteria=[
                lambda rows, *_, **__: torch.full((len(rows),), must_end(), device=rows.device)
            ],
            streamer=streamer,
        )
    finally:
        base.generation_config = generation
    generated: str = tokenizer.decode(output[0, len(prompt) :], skip_special_tokens=True)
    return generated


def save_adapter(session: train.Session, network: TrainedPart, name: str) -> None:
    """Saves what is trained now under a name, for other programs."""
    # A rank that becomes the first later writes the same again.
    state = {key: tensor.detach().cpu().clone() for key, tensor in network.named_parameters()}
    session.keep(f"{ADAPTERS}/{name}", lambda folder: network.save(folder / ADAPTERS / name, state))


def describe(
    options: SftOptions, data: ChatData, base: Reference, *, is_packed: bool
) -> dict[str, Any]:
    """Describes the model and its data, for its use and for the record."""
    return {
        "format": 1,
        "task": "sft",
        "model": options.model,
        "base": base.content,
        "base_settings": base.settings,
        "method": options.method,
        **objective_identity(options),
        "lora_rank": options.lora_rank,
        "lora_alpha": options.lora_alpha,
        "chat_template": "none" if options.chat_template == "none" else "",
        "system": options.system,
        "max_length": options.max_length,
        "too_long": options.too_long,
        "pack": is_packed,
        "skip_damaged": options.skip_damaged,
        "data": {
            "source": data.source,
            "test": options.test_data,
            "config": options.data_config,
            "format": data.format,
            "fingerprint": data.fingerprint,
            "split": data.split,
            "sizes": {name: len(rows) for name, rows in data.splits.items()},
        },
        "seed": options.seed,
        "number_format": options.dtype,
    }


main = partial(common.run, "sft", train_sft)


if __name__ == "__main__":
    sys.exit(main())
