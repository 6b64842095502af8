#!/usr/bin/env bash
# Runs the bundled example on an emulated Arm processor and on this machine's own, and compares what they sampled and learned.
# arm.sh [--steps N]: needs root, apt-get and the network on an x86-64 Debian; the Arm system is kept in output/arm64.
set -euo pipefail

steps=2
case "${1:-}" in
"") ;;
--steps) steps="${2:-}" ;;
--steps=*) steps="${1#--steps=}" ;;
*) steps= ;;
esac
refuse() {
    echo "mindgrpo: $1" >&2
    exit 2
}
[[ "$steps" =~ ^[1-9][0-9]*$ ]] || refuse "'$*' is not '--steps N' with N of at least 1: leave it out for 2 steps."
[ "$(uname -m)" = x86_64 ] || refuse "this is a $(uname -m) machine, but arm.sh emulates Arm on x86-64: run 'bash scripts/quickstart.sh' here."
[ "$(id -u)" = 0 ] || refuse "arm.sh changes its root directory, which only root may do: run it as root, for example in a container with --privileged."

cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder="$PWD/output/arm64"
root="$folder/root"
packages=/usr/local/lib/python3.11/dist-packages
processor=neoverse-n1 # Armv8.2-A without SVE and bfloat16, as the Kunpeng 920 of many hosts of NPUs
mkdir -p "$folder"
say() { echo "mindgrpo: $1"; }
source scripts/setup_env.sh # before anything is timed: the other side of the comparison

missing=()
for need in debootstrap:debootstrap aarch64-linux-gnu-gcc:gcc-aarch64-linux-gnu qemu-aarch64-static:qemu-user-static; do
    command -v "${need%:*}" >/dev/null || missing+=("${need#*:}")
done
# The compiler's package only recommends its C library's headers.
[ -e /usr/aarch64-linux-gnu/include/stdint.h ] || missing+=(libc6-dev-arm64-cross)
if [ ${#missing[@]} -gt 0 ]; then
    say "installing ${missing[*]}"
    { apt-get -qq update && apt-get -qq install -y --no-install-recommends "${missing[@]}"; } >"$folder/apt.log" 2>&1 ||
        refuse "apt-get could not install ${missing[*]} (see $folder/apt.log): install them, or repair the network."
fi

# The kernel starts programs for Arm through qemu, which it opens now, so that it need not be in the other root.
formats=/proc/sys/fs/binfmt_misc
[ -e $formats/register ] || mount -t binfmt_misc binfmt_misc $formats ||
    refuse "binfmt_misc cannot be mounted, so programs for Arm cannot be started: use a kernel that has it, or a privileged container."
if [ ! -e $formats/qemu-aarch64 ]; then
    magic='\x7f\x45\x4c\x46\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
    mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
    printf %s ":qemu-aarch64:M::$magic:$mask:$(command -v qemu-aarch64-static):OF" >$formats/register
fi

if [ ! -e "$folder/unpacked" ]; then
    say "unpacking Debian for arm64 into $root"
    rm -rf "$root"
    debootstrap --foreign --variant=minbase --arch=arm64 --include=python3,libgomp1,libstdc++6 \
        bookworm "$root" >"$folder/debootstrap.log" 2>&1 ||
        refuse "debootstrap failed (see $folder/debootstrap.log): repair the network and run this again."
    # Unpacked here: emulated, dpkg takes a quarter of an hour, and its scripts are for a system that is started.
    for package in "$root"/var/cache/apt/archives/*.deb; do
        dpkg-deb --fsys-tarfile "$package" | tar -x -C "$root" --keep-directory-symlink
    done
    ln -s python3 "$root/usr/bin/python" # what msrun starts
    echo 'root:x:0:0:root:/root:/bin/bash' >"$root/etc/passwd"
    # In a container debootstrap leaves a link to this machine's.
    [ ! -L "$root/proc" ] || rm "$root/proc"
    mkdir -p "$root/host" "$root/proc" "$root/dev" "$root/usr/local/bin"
    # This machine's compiler for Arm runs there as it is, not emulated.
    mkdir -p "$root/lib64"
    ln -sf /host/lib64/ld-linux-x86-64.so.2 "$root/lib64/ld-linux-x86-64.so.2"
    ln -sfn /host/usr/lib/x86_64-linux-gnu "$root/usr/lib/x86_64-linux-gnu"
    ln -sfn /host/usr/aarch64-linux-gnu "$root/usr/aarch64-linux-gnu"
    cat >"$root/usr/local/bin/cross-cc" <<CROSS
#!/bin/sh
for word; do
    shift
    [ "\$word" = -march=native ] && word=-mcpu=$processor
    set -- "\$@" "\$word"
done
exec /host/usr/bin/aarch64-linux-gnu-gcc "\$@"
CROSS
    chmod +x "$root/usr/local/bin/cross-cc"
    touch "$folder/unpacked"
fi

say "installing this clone's wheel and what it needs for arm64"
rm -rf "$folder/source" "$folder/wheel"
mkdir "$folder/source"
tar -c --exclude=./output --exclude='./.venv*' --exclude=./.git . | tar -x -C "$folder/source"
pip() { python -m pip --quiet --disable-pip-version-check --no-input "$@" >>"$folder/pip.log" 2>&1; }
pip wheel --no-deps --wheel-dir "$folder/wheel" "$folder/source" ||
    refuse "the wheel could not be built (see $folder/pip.log)."
if ! cmp -s setup.py "$folder/installed"; then
    platforms=(--platform manylinux2014_aarch64)
    for minor in {17..36}; do platforms+=(--platform "manylinux_2_${minor}_aarch64"); done
    rm -rf "$root$packages"
    pip install --target "$root$packages" --no-compile --only-binary=:all: --python-version 3.11 \
        --implementation cp "${platforms[@]}" "$folder"/wheel/*.whl ||
        refuse "pip could not install the packages for arm64 (see $folder/pip.log): repair the network and run this again."
    cp setup.py "$folder/installed"
else
    # pip would put this wheel's programs in place of all.
    rm -rf "$root$packages"/mindgrpo "$root$packages"/mindgrpo-*.dist-info
    python -m zipfile --extract "$folder"/wheel/*.whl "$root$packages"
fi
sed -i '1s|^#!.*python.*|#!/usr/bin/python3|' "$root$packages"/bin/*
rm -rf "$root/work"
mkdir -p "$root/work" "$root/root"
cp -a examples "$root/work"

on_arm() { # COMMAND: ends with everything that it has started, and leaves nothing mounted
    unshare --mount --pid --fork --kill-child bash -c '
        root="$1"
        shift
        mount -t proc proc "$root/proc"
        mount --rbind /dev "$root/dev"
        mount --bind / "$root/host"
        exec chroot "$root" env -i HOME=/root LANG=C.UTF-8 QEMU_CPU='"$processor"' CC=/usr/local/bin/cross-cc \
            PATH='"$packages"'/bin:/usr/local/bin:/usr/bin:/bin sh -c "cd /work && exec \"\$@\"" sh "$@"
    ' bash "$root" "$@"
}

# Under qemu 7.2 a fork of a process with threads may wait for ever for a lock of qemu's own, as it did where rank 0 of 4
# starts the program that draws the curve. What is compared is complete before, with summary.json.
run_on_arm() { # SUMMARY COMMAND
    local summary="$1" job
    shift
    on_arm "$@" &
    job=$!
    while kill -0 $job 2>/dev/null; do
        sleep 5
        if [ -e "$summary" ] && [ $(($(date +%s) - $(stat -c %Y "$summary"))) -gt 60 ]; then
            echo "ended after a minute without anything to do"
            pkill -KILL -P $job
            wait $job || true
            return 0
        fi
    done
    wait $job
}

say "compiling the C library for $processor"
started=$SECONDS
on_arm python3 -c 'from mindgrpo.backend.kernels.native.library import build; print(build())'
say "the C library was there after $((SECONDS - started)) s"

layout() { # SECTION data_parallel model_parallel pipeline_stage
    local key="--$1.parallel_config"
    arguments+=("$key.data_parallel" "$2" "$key.model_parallel" "$3" "$key.pipeline_stage" "$4")
}
compared=()
for ranks in 1 4; do
    arguments=(--config examples/grpo/tiny_arithmetic/grpo_config.yaml --rl_config.max_steps "$steps" --rl_config.eval_samples 2
        --rl_config.prompts_per_step 2 --rl_config.num_generations 4)
    if [ $ranks = 1 ]; then
        layout actor_config 1 1 1
        layout generate_config 1 1 1
    else
        layout actor_config 1 2 2
        layout generate_config 2 2 1
    fi
    job=(-m mindgrpo launch --ranks $ranks "${arguments[@]}")
    for machine in arm x86; do
        run="output/arm64/$machine-$ranks"
        [ $machine = arm ] && there="$root/work/$run" || there="$PWD/$run"
        rm -rf "$there"
        say "running $steps steps on $ranks ranks: $machine"
        started=$SECONDS
        if [ $machine = arm ]; then
            run_on_arm "$there/summary.json" python3 "${job[@]}" --output_dir "$run"
        else
            python "${job[@]}" --output_dir "$run"
        fi >"$folder/$machine-$ranks.log" 2>&1 || {
            tail -n 20 "$folder/$machine-$ranks.log" >&2
            refuse "the run on $ranks ranks failed: $machine (see $folder/$machine-$ranks.log)."
        }
        compared+=("$there" $((SECONDS - started)))
    done
done
python scripts/bench/same_runs.py "${compared[@]}"
