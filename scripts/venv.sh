# Sourced by the scripts beside it: `prepare_venv EXTRAS` makes .venv when it is missing or broken and
# installs the project into it when pyproject.toml, constraints.txt or the folder's place has changed since.

ROOT="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$ROOT/.venv"

fail() {
    echo "error: $*" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in python3 python3.11 python3.12 python3.13 python3.14; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' \
            >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

# A half-made venv has no python, no pip, or a python that is gone from the system.
venv_works() {
    "$VENV/bin/python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

make_venv() {
    local python
    python="$(find_python)" || fail "Phalanx needs Python 3.11 to 3.14, and none of python3," \
        "python3.11 ... python3.14 is one; install it and run this again"
    if [[ -e "$VENV" ]]; then
        echo "$VENV is broken and is made anew"
        rm -rf -- "$VENV"
    fi
    echo "making $VENV with $("$python" --version)"
    "$python" -m venv "$VENV" || fail "$python cannot make a virtual environment;" \
        "on Debian and Ubuntu: apt install $(basename "$python")-venv"
}

# What an installation depends on: the project's metadata, the versions, and where it lies (it is editable).
stamp_of() {
    echo "$1 $ROOT $(cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt" | cksum)"
}

prepare_venv() {
    local extras="$1" stamp wanted
    stamp="$VENV/.phalanx-installed${extras:+-$extras}"
    wanted="$(stamp_of "$extras")"
    # Two scripts started at once must not both install; the lock ends with the subshell.
    (
        if command -v flock >/dev/null; then
            flock 9
        fi
        venv_works || make_venv
        if [[ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]]; then
            echo "installing Phalanx into $VENV; the first time this takes a minute or more"
            "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check \
                --constraint "$ROOT/constraints.txt" --editable "$ROOT${extras:+[$extras]}" ||
                fail "the installation failed; pip's message stands above"
            echo "$wanted" >"$stamp"
        fi
    ) 9<"$ROOT/pyproject.toml" || exit 1
}

# run_module MODULE ARGUMENTS: `python -m` of a module of this repository, from wherever one stands.
run_module() {
    PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" exec "$VENV/bin/python" -m "$@"
}
