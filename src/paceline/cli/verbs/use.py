"""The verbs that use the model of a run in one process: predict, generate, export and others.

Each runs a script of ``recipes.use``.
"""

from __future__ import annotations

from pathlib import Path

import click

from paceline.cli.model_scripts import SCRIPTS, model_folder, run_script
from paceline.cli.verb import Verb


def _verb(name: str, options: str, words: str, text: str) -> Verb:
    """Makes a verb that runs the script of the same name.

    Args:
        options: Class of the options that it takes besides.
        words: What follows RUN, in the words of the help; optional if it has brackets.
    """

    def use(run: Path, words: tuple[str, ...]) -> None:
        run_script(name, ["--run", str(model_folder(run)), *words])

    needed = not words.startswith("[")
    arguments = [
        click.Argument(["run"], type=click.Path(path_type=Path)),
        click.Argument(["words"], nargs=-1, metavar=words, required=needed, type=click.UNPROCESSED),
    ]
    return Verb(name, callback=use, params=[*arguments], help=text,
                options_of=f"{SCRIPTS}:{options}")  # fmt: skip


predict = _verb("predict", "PredictOptions", "INPUT...", """\
Print the class of each INPUT and its probabilities, with the model of RUN.

INPUT is an image file or a folder of images; for a text model a text, a csv, tsv, jsonl, parquet
or txt file of texts, or - for the lines of standard input.""")  # fmt: skip
translate = _verb("translate", "TranslateOptions", "[SENTENCE...]", """\
Translate each SENTENCE with the model of RUN. Without any, or with -, translate each line of
standard input.

Standard output gets one translation per line and nothing else.""")  # fmt: skip
generate = _verb("generate", "GenerateOptions", "[PROMPT...]", """\
Continue each PROMPT with the language model of RUN. Without any, or with -, continue the text of
standard input.

A model that was trained on conversations answers instead: each PROMPT, or each line of standard
input, is a message. Standard output gets the new text and nothing else.""")  # fmt: skip
export = _verb("export", "ExportOptions", "[OPTIONS]", """\
Write the model of RUN for other programs.

Loading the result executes no code.""")  # fmt: skip
benchmark = _verb("benchmark", "BenchmarkOptions", "[OPTIONS]", """\
Measure latency and throughput of the model of RUN.""")  # fmt: skip
quantize = _verb("quantize", "QuantizeOptions", "[OPTIONS]", """\
Write the model of RUN with 8-bit weights, for CPUs.

The result is first evaluated on the held-out data. If it loses more accuracy than --max-drop,
nothing is written.""")  # fmt: skip
