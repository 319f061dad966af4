#!/usr/bin/env bash
# From a fresh clone to a language model that you trained, in under 10 minutes on 2 CPU cores:
#   bash scripts/quickstart.sh           installs into .venv, trains, kills the training, goes on, shows what was learnt
#   bash scripts/quickstart.sh ARGS...   the arguments go to the training, as in: --max_steps 3000
# Ctrl-C stops it at any moment. Started again it goes on from the newest checkpoint in out/quickstart; when all steps
# are done it only shows what was learnt. To begin anew: rm -r out/quickstart
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh
run=out/quickstart

say "1/4 looking for Python and its packages in .venv"
install requirements.txt

# Two processes show what many do. Each needs a GPU of its own, and gloo cannot add up gradients on Apple's, so with one
# GPU, or on a Mac, one is right. bfloat16 is twice as fast where the CPU has it, and ten times slower where it has not.
read -r ranks dtype where < <(.venv/bin/python - <<'PYTHON'
import sys
import torch
from trainer.advice import cpu_has_bfloat16

gpus = torch.cuda.device_count()
quick = gpus or cpu_has_bfloat16()
print(min(gpus, 2) or (1 if sys.platform == "darwin" else 2), "bfloat16" if quick else "float32",
      "NCCL on GPUs" if gpus > 1 else "the GPU" if gpus or torch.backends.mps.is_available() else "gloo on the CPU")
PYTHON
)
launch="-m scripts.launch --nproc_per_node $ranks"
[ "$ranks" -gt 1 ] || launch=""

train() { # the same command every time: it begins, or goes on from the newest checkpoint
    .venv/bin/python $launch train_pretrain.py \
        --hidden_size 256 --num_hidden_layers 4 --num_attention_heads 4 --qk_norm --dtype "$dtype" \
        --max_seq_len 128 --batch_size $((16 / ranks)) --max_steps 1000 --learning_rate 3e-3 --lr_scaling none \
        --num_workers 0 --checkpoint_interval 200 --log_interval 20 "$@" --out_dir "$run" &
    training=$!
}
stop() {
    trap '' INT TERM HUP
    kill -TERM "$training" 2>/dev/null || true # the ranks finish their step and save it
    wait "$training" || true
    say "stopped; the same command goes on from here"
    exit 130
}
runs() { kill -0 "$training" 2>/dev/null; }
has_checkpoint() { compgen -G "$run/step_????????" >/dev/null; }
logged() { cat "$run/metrics.jsonl" 2>/dev/null | wc -l; }

trap stop INT TERM HUP
if has_checkpoint; then
    say "2/4 $run has a checkpoint: the same command goes on from there"
    train "$@"
else
    say "2/4 training 4.6 million parameters on dataset/starter; processes: $ranks, $where, $dtype (4 minutes on 2 cores)"
    train "$@"
    until has_checkpoint || ! runs; do sleep 0.2; done
    seen=$(logged)
    until [ "$(logged)" -gt "$seen" ] || ! runs; do sleep 0.2; done
    if runs; then
        kill -9 "$training" || true # its ranks die with it
        { wait "$training" || true; } 2>/dev/null
        echo # the progress bar did not get to end its line
        say "3/4 killed it with SIGKILL; the same command again goes on from the newest checkpoint"
        train "$@"
    fi
fi
wait "$training" || { code=$?; fail "the training ended with code $code; the lines above say why$([ $code -ne 78 ] || echo " (to begin anew: rm -r $run)")"; }
trap - INT TERM HUP

say "4/4 what it learnt (a checkpoint is a transformers folder; README.md says how to go on)"
.venv/bin/python - "$run" <<'PYTHON'
import json
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from transformers.utils import logging

logging.disable_progress_bar()
run = Path(sys.argv[1])
lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
losses = [line for line in lines if "loss" in line]
for line in losses:
    line["loss"] = float("nan") if line["loss"] is None else line["loss"]
first, last = losses[0], losses[-1]
print(f"loss {first['loss']:.2f} at step {first['step']}, {last['loss']:.2f} at step {last['step']}")
folder = sorted(run.glob("step_????????"))[-1]
model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
set_seed(42)
for prompt in ("Once upon a time", "The capital of France", "从前", "小华"):
    ids = tokenizer("<|im_start|>" + prompt, return_tensors="pt", return_token_type_ids=False)
    text = model.generate(**ids, max_new_tokens=50, do_sample=True, temperature=0.5, top_p=0.9)
    print(f"  {tokenizer.decode(text[0], skip_special_tokens=True)!r}")
PYTHON
say "done in $((SECONDS / 60)) min $((SECONDS % 60)) s; the model is in $run"
