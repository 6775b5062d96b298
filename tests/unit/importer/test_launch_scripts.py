"""Launch scripts in the forms that are in use: what would be launched is found, and what was left out is said."""

from pathlib import Path

import pytest

from fuligo.errors import ConfigError
from fuligo.importer.run import import_script
from tests.unit.importer.conftest import Import

CLEANUP = """#!/bin/bash
# for rerun the task
pkill -9 sglang
sleep 3
ray stop --force
set -ex
export PYTHONUNBUFFERED=1
"""
MODEL = """NLAYERS=5
FIRST_K_DENSE=2
pattern=()
for ((i=0; i<NLAYERS; i++)); do
  if (( i < FIRST_K_DENSE )); then pattern+=(0); else pattern+=(1); fi
done
printf -v FREQUENCY "[%s]" "$(IFS=','; echo "${pattern[*]}")"
MODEL_ARGS=(
   --num-layers $NLAYERS
   --rotary-base "${ROTARY_BASE:-10000}"
   --moe-layer-freq $FREQUENCY
)
"""
SCRIPT_DIR = 'SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\n'


def test_model_arguments_from_another_file(imported: Import):
    result = imported(
        CLEANUP
        + SCRIPT_DIR
        + 'source "${SCRIPT_DIR}/models/m.sh"\nMODEL_ARGS+=( --rotary-base 5 )\npython3 train.py ${MODEL_ARGS[@]} --colocate\n',
        files={"models/m.sh": MODEL},
        ROTARY_BASE="7",
    )
    assert result.launch.arguments == (
        "--num-layers", "5", "--rotary-base", "7", "--moe-layer-freq", "[0,0,1,1,1]", "--rotary-base", "5", "--colocate",
    )  # fmt: skip
    assert result.launch.place == "run.sh line 11"
    assert "run.sh line 3: `pkill -9 sglang` is not run" in result.notes


def test_a_file_beside_the_folder_needs_a_wider_root(tmp_path: Path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "m.sh").write_text(MODEL)
    script = tmp_path / "examples" / "run.sh"
    script.parent.mkdir()
    script.write_text(SCRIPT_DIR + "source $SCRIPT_DIR/../models/m.sh; python3 train.py ${MODEL_ARGS[@]}")
    with pytest.raises(ConfigError, match="--root DIR"):
        import_script(script)
    assert "--num-layers" in import_script(script, root=tmp_path).launch.arguments


def test_environment_of_a_submitted_job(imported: Import):
    result = imported('''
NVLINK_COUNT=$(nvidia-smi topo -m 2>/dev/null | grep -o 'NV[0-9][0-9]*' | wc -l)
if [ "$NVLINK_COUNT" -gt 0 ]; then HAS_NVLINK=1; else HAS_NVLINK=0; fi
echo "HAS_NVLINK: $HAS_NVLINK (detected $NVLINK_COUNT references)"
export MASTER_ADDR=${MASTER_ADDR:-"127.0.0.1"}
ray start --head --node-ip-address ${MASTER_ADDR} --num-gpus 8 --disable-usage-stats
RUNTIME_ENV_JSON="{
  \\"env_vars\\": {
    \\"NCCL_NVLS_ENABLE\\": \\"${HAS_NVLINK}\\",
    \\"no_proxy\\": \\"127.0.0.1,${MASTER_ADDR}\\"
  }
}"
ray job submit --address="http://127.0.0.1:8265" \\
   --runtime-env-json="${RUNTIME_ENV_JSON}" \\
   -- python3 train.py --actor-num-nodes 1
''')  # fmt: skip
    assert result.launch.environment == {"NCCL_NVLS_ENABLE": "1", "no_proxy": "127.0.0.1,127.0.0.1"}
    assert result.launch.arguments == ("--actor-num-nodes", "1")
    assert any("NVLink" in note for note in result.notes)


def test_single_quotes_around_the_environment_are_noted(imported: Import):
    result = imported("""ray job submit --runtime-env-json='{"env_vars": {"A": "${X}"}}' -- python3 train.py""")
    assert result.launch.environment == {"A": "${X}"}
    assert any("single quotes" in note for note in result.notes)


def test_environment_of_a_plain_start(imported: Import):
    """It is what the script exports or sets before the command, not the caller's."""
    result = imported("export A=1; B=2; C=3 python3 train.py 2>&1 | tee log.txt", MASTER_ADDR="x")
    assert result.launch.environment == {"A": "1", "C": "3"}


def test_workers_from_a_host_file(imported: Import, tmp_path: Path):
    loop = """for WORKER_IP in $(awk '{print $1}' $HOSTFILE); do
  if [[ "$WORKER_IP" == "$MASTER_ADDR" ]]; then continue; fi
  WORKERS+=($WORKER_IP)
  ssh root@"${WORKER_IP}" \\
    "pkill -9 sglang ; ray stop --force ; pkill -9 python ; ray start --address=${MASTER_ADDR}:6379 --num-gpus 8" &
done
wait
python3 train.py --actor-num-nodes $((${#WORKERS[@]} + 1))
"""
    hosts = tmp_path / "elsewhere" / "hosts"
    hosts.parent.mkdir()
    hosts.write_text("10.0.0.1 slots=8\n10.0.0.2 slots=8\n10.0.0.3 slots=8\n")
    result = imported(loop, HOSTFILE=str(hosts), MASTER_ADDR="10.0.0.1")
    assert result.launch.arguments == ("--actor-num-nodes", "3")
    assert any("`ssh ...` is not run: root@10.0.0.2 pkill -9 sglang" in note for note in result.notes)


def test_host_file_read_line_by_line(imported: Import):
    script = """while IFS= read -r ip; do
  [ -z "$ip" ] && continue
  ssh $ip "ray start --address=h:6379" &
  n+=1
done < "$(dirname $0)/hosts"
python3 train.py --x ${n}
"""
    result = imported(script, files={"hosts": "a\n\nb\n"})
    assert result.launch.arguments == ("--x", "11")


def test_a_host_file_that_is_not_here_has_no_workers(imported: Import):
    result = imported("for ip in $(awk '{print $1}' /root/mpi_hostfile); do ssh $ip 'ray start'; done; python3 train.py")
    assert any("/root/mpi_hostfile" in note and "No such file" in note for note in result.notes)


def test_files_that_the_script_writes(imported: Import):
    result = imported("""
CONFIG=$(mktemp /tmp/topology.XXXXXX.yaml)
cat > "$CONFIG" <<EOF
sglang:
  - name: default
    server_groups: [{worker_type: regular, num_gpus: ${NUM:-8}}]
EOF
python3 train.py --sglang-config $CONFIG
""")
    path = result.launch.arguments[1]
    assert result.file_text(path) == "sglang:\n  - name: default\n    server_groups: [{worker_type: regular, num_gpus: 8}]\n"
    assert not Path(path).exists()


def test_a_conversion_is_another_job(imported: Import):
    result = imported(
        "if [ ! -d /root/x_dist ]; then torchrun --nproc-per-node 8 tools/convert_hf_to_torch_dist.py --save /root/x_dist; fi\n"
        "PYTHONPATH=/root/M torchrun tools/convert_hf_to_torch_dist.py --save /x\npython train.py --a 1"
    )
    assert result.launch.arguments == ("--a", "1")
    assert [note for note in result.notes if "converts a checkpoint" in note] == [
        f"run.sh line {line}: `torchrun ... tools/convert_hf_to_torch_dist.py` is not run: it converts a checkpoint, which is another job"
        for line in (1, 2)
    ]


def test_train_async_is_recognized(imported: Import):
    launch = imported("python3 train_async.py --a 1").launch
    assert launch.arguments == ("--a", "1")
    assert launch.is_async


def test_arguments_of_the_script(imported: Import):
    assert imported("python3 train.py --n $1 $2", arguments=("3", "4")).launch.arguments == ("--n", "3", "4")


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("MODEL_ARGS += ( --rotary-base 10000 )", "write `MODEL_ARGS+=( --rotary-base 10000 )`"),
        ("MODEL_ARGS+= ( --rotary-base 10000 )", "write `MODEL_ARGS+=( --rotary-base 10000 )`"),
        ("X = 3", "write `X=3`"),
        ("X =3", "write `X=3`"),
    ],
)
def test_a_space_around_the_sign_of_an_assignment(line: str, fix: str, imported: Import):
    with pytest.raises(ConfigError) as refused:
        imported(f"MODEL_ARGS=()\n{line}\npython3 train.py")
    assert fix in str(refused.value)
    assert "line 2" in str(refused.value)


def test_an_unset_variable_is_empty_and_says_how_to_set_it(imported: Import):
    result = imported("NAME=x\npython3 train.py --save $BASE_DIR/$NAME \\\n --run $RUN_NAME/x --n $1")
    assert result.launch.arguments == ("--save", "/x", "--run", "/x", "--n")
    fixes = [
        "BASE_DIR=VALUE fuligo import-script run.sh",
        "fuligo import-script run.sh --env RUN_NAME=VALUE",
        "fuligo import-script run.sh ARGUMENT",
    ]
    for fix in fixes:
        assert any(f"is not set and expands to nothing; set it with: {fix}" in note for note in result.notes)


def test_a_script_that_checks_for_a_variable(imported: Import):
    check = 'if [ -z "${BASE_DIR}" ]; then\n  echo "BASE_DIR is not set."\n  exit 1\nfi\npython3 train.py --save $BASE_DIR'
    with pytest.raises(ConfigError) as refused:
        imported(check)
    text = str(refused.value)
    assert "line 3: the script ends with status 1 before it starts train.py; it printed: BASE_DIR is not set.;" in text
    assert "set it with: BASE_DIR=" in text
    assert imported(check, BASE_DIR="/shared").launch.arguments == ("--save", "/shared")


def test_an_unset_array_is_noted(imported: Import):
    result = imported("python3 train.py ${EVAL_ARGS[@]} --a 1")
    assert result.launch.arguments == ("--a", "1")
    assert any("EVAL_ARGS is not set" in note for note in result.notes)


def test_two_launches_are_refused(imported: Import):
    with pytest.raises(ConfigError, match=r"2 training jobs \(run.sh line 1, run.sh line 2\)"):
        imported("python3 train.py --a 1\npython3 train.py --a 2")


def test_a_missing_script():
    with pytest.raises(ConfigError, match=r"cannot import nowhere\.sh: there is no such file"):
        import_script(Path("nowhere.sh"))


def test_set_e_ends_at_a_failure(imported: Import):
    with pytest.raises(ConfigError, match="line 2: the script ends with status 1"):
        imported("set -e\nfalse\npython3 train.py")
    assert imported("set -e\nfalse || true\nif false; then :; fi\n! true\npython3 train.py").launch.place == "run.sh line 5"


def test_mapped_folder_stands_at_a_path_of_another_machine(tmp_path: Path, sandbox: None):
    (tmp_path / "checkout" / "scripts" / "models").mkdir(parents=True)
    (tmp_path / "checkout" / "scripts" / "models" / "m.sh").write_text(MODEL)
    script = tmp_path / "run" / "run.sh"
    script.parent.mkdir()
    script.write_text('source "/root/slime/scripts/models/m.sh"\npython3 train.py ${MODEL_ARGS[@]}')
    with pytest.raises(ConfigError, match=r"/root/slime/scripts/models/m\.sh does not exist in the sandbox; use --map /root/slime=DIR"):
        import_script(script)
    assert "--num-layers" in import_script(script, maps={"/root/slime": tmp_path / "checkout"}).launch.arguments


@pytest.mark.parametrize(
    "command",
    [
        "exec python3 train.py --a 1",
        "/usr/bin/python3 train.py --a 1",
        "/opt/conda/bin/python3.10 -u train.py --a 1",
        "/opt/conda/bin/python train.py --a 1 > train.log 2>&1 &",
        "pkill -9 python train.py; python3 train.py --a 1",
        "V=/root/venv; $V/bin/python train.py --a 1",
        "env -i /usr/bin/python3 train.py --a 1",
        "sh -c 'python3 train.py --a 1'",
        "echo --a 1 | xargs python3 train.py",
        "eval 'python3 train.py' --a 1",
        "ray job submit -- bash -c 'cd / && python3 train.py --a 1'",
        "ray job submit --address x python3 train.py --a 1",
        "timeout 60 nohup python3 -m torch.distributed.run train.py --a 1 &",
        "srun --nodes 2 python3 train.py --a 1",
        "sudo -E -u root python3 train.py --a 1",
        "python3 -m slime.train --a 1",
        "PATH=/usr/bin:$PATH python3 train.py --a 1",
        "unset PATH; /bin/torchrun train.py --a 1",
        "trap 'python3 train.py --a 1' EXIT; exit 3",
        "source <(echo python3 train.py --a 1)",
    ],
)
def test_every_way_to_start_is_recorded(command: str, imported: Import):
    assert imported(command).launch.arguments == ("--a", "1")


def test_commands_that_are_not_known_are_noted(imported: Import):
    result = imported('X=$(module avail)\nspack load cuda\nV=$(git rev-parse HEAD)\npython3 train.py --v "$V"')
    assert result.launch.arguments == ("--v", "")
    assert "run.sh line 2: `spack load cuda` is not run (an unknown command, assumed to succeed)" in result.notes
    assert "run.sh line 3: `git rev-parse HEAD` is not run; the script reads its output, which is taken as empty" in result.notes


def test_line_ends_of_windows_are_refused(imported: Import):
    with pytest.raises(ConfigError, match=r"it has Windows line endings.*sed -i 's/\\r\$//' run\.sh"):
        imported("python3 train.py --prompt-data d.jsonl\r\n")


def test_line_ends_of_windows_in_a_file_that_the_script_reads_are_refused(imported: Import):
    with pytest.raises(ConfigError, match=r"has Windows line endings, so bash read '/models/policy\\r' as an argument.*sed -i"):
        imported("source <(printf 'MODEL=/models/policy\\r\\n')\npython3 train.py --hf-checkpoint $MODEL --colocate")


def test_flags_after_a_line_without_a_backslash_are_refused(imported: Import):
    with pytest.raises(ConfigError, match=r"line 3: `--lr 1e-6` is run as a command: the line before it ends without `\\`"):
        imported('ARGS=(--lr 1e-6)\npython3 train.py --colocate\n   "${ARGS[@]}"')


@pytest.mark.parametrize("command", ["ssh node1 'cd x; python3 train.py'", "ssh node1 python3 train.py --a 1"])
def test_training_on_another_machine_is_refused(command: str, imported: Import):
    with pytest.raises(ConfigError, match="starts the training on another machine"):
        imported(command)


def test_an_interpreter_in_the_folder_of_the_script_is_recorded(imported: Import, tmp_path: Path):
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\ntouch ran\n")
    python.chmod(0o755)
    for command in (f"{python} train.py --a 1", "cd $(dirname $0); V=$PWD/.venv/bin; $V/python train.py --a 1"):
        assert imported(command).launch.arguments == ("--a", "1")
    assert python.read_text() == "#!/bin/sh\ntouch ran\n"


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("docker run --gpus all -v /a:/b slime:latest bash -c 'cd /root/slime && python3 train.py --lr 1e-6'", "docker"),
        ("srun --nodes=2 bash -c 'python3 train.py --lr 1e-6'", "srun"),
        ("sbatch inner.sh", "sbatch"),
    ],
)
def test_a_command_that_starts_the_training_out_of_sight_is_named(command: str, name: str, imported: Import):
    with pytest.raises(ConfigError, match=f"before it starts train.py; run.sh line 1: `{name}` is not run, and what it starts is not read"):
        imported(f"{command}")
    assert imported(f"{command}\npython3 train.py --a 1").launch.arguments == ("--a", "1")
    with pytest.raises(ConfigError) as raised:
        imported(f"{command}\nexit 3")
    assert "status 3" in str(raised.value) and "not read" not in str(raised.value)


def test_the_training_that_srun_starts_directly_is_read(imported: Import):
    assert imported("srun --nodes=2 --container-image=x python3 train.py --a 1").launch.arguments == ("--a", "1")


def test_a_missing_output_is_named_where_it_ends_the_script(imported: Import):
    with pytest.raises(
        ConfigError, match=r"ends with status 1 before it starts train.py; .*line 2: `pip list` is not run; the script reads"
    ):
        imported("set -euo pipefail\nX=$(pip list | grep megatron)\npython3 train.py --x $X")


def test_writes_stay_in_the_sandbox(imported: Import, tmp_path: Path):
    result = imported("set -e\ncd $(dirname $0)\nmkdir -p logs\necho 7 > logs/n\nsed -i s/7/8/ logs/n\npython3 train.py --n $(cat logs/n)")
    assert result.launch.arguments == ("--n", "8")
    assert [path.name for path in tmp_path.iterdir()] == ["run.sh"]
