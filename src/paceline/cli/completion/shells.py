"""What a shell asks at TAB, and the few lines of shell by which it asks.

click finds out which option or argument is meant; ``paceline.cli.completion.suggestions`` knows
its values. On any error the shell gets an empty answer: a line that is being typed is no place for
errors.
"""

from __future__ import annotations

import os
import re
import shlex
from typing import Any, ClassVar

import click
from click.shell_completion import (
    CompletionItem,
    ShellComplete,
    add_completion_class,
    split_arg_string,
)

from paceline.spec.terminal import clean

# The line up to the cursor is in COMP_LINE; each answer is a line of its own: what it is (a value,
# or that files or folders are meant), the text, and what the shell shows beside it.
VARIABLE = "_PACELINE_COMPLETE"
BASH = r"""
_paceline_completion() {
    local kind text help path
    COMPREPLY=()
    while IFS=$'\t' read -r kind text help; do
        if [[ $kind == plain ]]; then
            COMPREPLY+=("$text")
        else
            compopt -o filenames 2>/dev/null
            while IFS= read -r path; do COMPREPLY+=("$path"); done < <(
                compgen "-${kind:0:1}" -- "$text")
        fi
    done < <(_PACELINE_COMPLETE=bash_complete COMP_LINE="${COMP_LINE:0:COMP_POINT}" \
             COMP_WORDBREAKS="$COMP_WORDBREAKS" "${1/#\~/$HOME}" 2>/dev/null)
}
complete -o nosort -F _paceline_completion paceline 2>/dev/null ||
    complete -F _paceline_completion paceline
"""
ZSH = r"""#compdef paceline
_paceline_completion() {
    local -a replies described plain parts
    local reply files folders line="${(j: :)words[1,CURRENT-1]} ${IPREFIX}${PREFIX}"
    replies=("${(@f)$(_PACELINE_COMPLETE=zsh_complete COMP_LINE="$line" \
        ${(Q)${~words[1]}} 2>/dev/null)}")
    [[ $PREFIX == --*=* ]] && compset -P '*='
    for reply in $replies; do
        parts=("${(@ps:\t:)reply}")
        case $parts[1] in
            plain) if [[ -n $parts[3] ]]; then described+=("${parts[2]//:/\\:}:$parts[3]")
                   else plain+=("$parts[2]"); fi ;;
            file) files=1 ;;
            dir) folders=1 ;;
        esac
    done
    (( $#described )) && _describe -V paceline described
    (( $#plain )) && compadd -V paceline -a plain
    [[ -n $files ]] && _files
    [[ -n $folders ]] && _files -/
    return 0
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _paceline_completion "$@"
else
    (( $+functions[compdef] )) || { autoload -Uz compinit && compinit -i }
    compdef _paceline_completion paceline
fi
"""
FISH = r"""
function _paceline_completion
    set -l words (commandline -opc)
    set -l line (commandline -cp | string collect)
    set -l replies (env _PACELINE_COMPLETE=fish_complete COMP_LINE="$line" $words[1] 2>/dev/null)
    for reply in $replies
        set -l parts (string split \t -- $reply)
        switch $parts[1]
            case plain
                string join \t -- $parts[2..]
            case file
                for path in (__fish_complete_path $parts[2])
                    echo -- $parts[3]$path
                end
            case dir
                for path in (__fish_complete_directories $parts[2])
                    echo -- $parts[3]$path
                end
        end
    end
end
complete -c paceline -f -k -a '(_paceline_completion)'
"""


class _Completer(ShellComplete):
    def get_completion_args(self) -> tuple[list[str], str]:
        """Returns the words before the cursor's word, and the typed part of that word."""
        # a letter more tells a word that has begun from the blank before one
        *arguments, incomplete = split_arg_string(f"{os.environ['COMP_LINE']}x")
        while arguments and re.match(r"\w+=", arguments[0]):  # A=1 paceline …
            arguments.pop(0)
        return arguments[1:], incomplete[:-1]

    def complete(self) -> str:
        try:
            args, incomplete = self.get_completion_args()
            items = self.get_completions(args, incomplete)
            option, equals, value = incomplete.partition("=")
            head = f"{option}=" if equals and option.startswith("--") else ""
            lines = [self.answer(item, head, value if head else incomplete) for item in items]
            return "\n".join(line for line in lines if line.isprintable() or "\t" in line)
        except Exception:
            return ""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[str]]:
        from paceline.cli.completion.suggestions import suggestions

        return suggestions(self.cli, self.prog_name, args, incomplete)

    def answer(self, item: CompletionItem[str], head: str, incomplete: str) -> str:
        """Formats one line for the shell; ``head`` is ``--option=`` or empty."""
        raise NotImplementedError


def _response_line(kind: str, text: str, description: str = "") -> str:
    return "\t".join(" ".join(part.split()) for part in (kind, text, description)).rstrip("\t")


@add_completion_class
class Bash(_Completer):
    """bash replaces what follows the last of its word breaks, and quotes nothing by itself."""

    name: ClassVar[str] = "bash"
    source_template: ClassVar[str] = BASH

    def answer(self, item: CompletionItem[str], head: str, incomplete: str) -> str:
        breaks = "".join(set(os.environ.get("COMP_WORDBREAKS", "=:@")) & set("=:@"))
        word = re.split(f"[{breaks}]", head + incomplete)[-1] if breaks else head + incomplete
        if item.type != "plain":
            return f"{item.type}\t{word}"
        completed = head + item.value
        suffix = completed[len(head + incomplete) - len(word) :]
        return _response_line(
            "plain", suffix if re.fullmatch(r"[\w@%+=:,./~-]*", suffix) else shlex.quote(suffix)
        )


@add_completion_class
class Zsh(_Completer):
    """zsh quotes by itself; the function takes an option's name off."""

    name: ClassVar[str] = "zsh"
    source_template: ClassVar[str] = ZSH

    def answer(self, item: CompletionItem[str], head: str, incomplete: str) -> str:
        return _response_line(item.type, item.value, item.help or "")


@add_completion_class
class Fish(_Completer):
    """fish replaces the whole word, and quotes by itself."""

    name: ClassVar[str] = "fish"
    source_template: ClassVar[str] = FISH

    def answer(self, item: CompletionItem[str], head: str, incomplete: str) -> str:
        if item.type != "plain":
            return f"{item.type}\t{incomplete}\t{head}"
        return _response_line("plain", head + item.value, item.help or "")


SHELLS: dict[str, type[_Completer]] = {"bash": Bash, "zsh": Zsh, "fish": Fish}


def answer_shell(program: click.Command) -> Any:
    """Answers the shell that asked, by ``VARIABLE``."""
    shell = os.environ[VARIABLE].partition("_")[0]
    if shell in SHELLS:
        response = SHELLS[shell](program, {}, "paceline", VARIABLE).complete()
        click.echo(clean(response))
