#!/bin/bash
# Makes everything that `make demo` and `make test` need on Debian 12 or 13: Debian packages, .venv
# and access to /dev/fuse. Run as root, or as a user who may sudo. Stamps make a second run quick.
set -euo pipefail
cd "$(dirname "$0")/.."
export LC_ALL=C.UTF-8

APT_PACKAGES=(
    fuse3 libfuse3-dev pkg-config gcc libc6-dev python3 python3-dev python3-venv
    nfs-ganesha nfs-ganesha-vfs rpcbind
    util-linux mount procps curl iproute2 iptables attr xfsprogs e2fsprogs git make ca-certificates
)

if [[ $EUID == 0 ]]; then
    as_root() { "$@"; }
else
    as_root() {
        command -v sudo >/dev/null || { echo "setup: not root and no sudo: cannot: $*" >&2; exit 1; }
        sudo "$@"
    }
fi

missing_packages() {
    local p
    for p in "${APT_PACKAGES[@]}"; do
        [[ $(dpkg-query -W -f '${db:Status-Status}' "$p" 2>/dev/null) == installed ]] || echo "$p"
    done
}

# Installing nfs-ganesha or rpcbind would start them as services of this machine, on the well-known
# ports. policy-rc.d (exit code 101: action forbidden) is what invoke-rc.d asks before it does; the
# machine's own one, if any, is put back.
install_packages() {
    # shellcheck disable=SC2016
    as_root env DEBIAN_FRONTEND=noninteractive bash -euc '
        policy=/usr/sbin/policy-rc.d
        if [[ -e $policy || -L $policy ]]; then mv "$policy" "$policy.before-hsfs"; fi
        restore() {
            rm -f "$policy"
            if [[ -e $policy.before-hsfs || -L $policy.before-hsfs ]]; then
                mv "$policy.before-hsfs" "$policy"
            fi
        }
        trap restore EXIT
        printf "#!/bin/sh\nexit 101\n" >"$policy"
        chmod 755 "$policy"
        options=(-y -q -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3)
        if ! apt-get "${options[@]}" install --no-install-recommends "$@" </dev/null; then
            # An old package list, or none.
            apt-get "${options[@]}" update </dev/null
            apt-get "${options[@]}" install --no-install-recommends "$@" </dev/null
        fi
    ' setup "$@"
}

mapfile -t missing < <(missing_packages)
if ((${#missing[@]})); then
    echo "setup: installing Debian packages: ${missing[*]}"
    install_packages "${missing[@]}"
fi

# A root without an init has no /etc/mtab, where nfs-ganesha looks for the filesystem it exports.
if [[ ! -e /etc/mtab ]]; then
    as_root ln -sf ../proc/self/mounts /etc/mtab
fi
# A container often gives /dev/fuse to root alone; everywhere else Debian makes it 0666.
if [[ -c /dev/fuse && $(stat -c %a /dev/fuse) != 666 ]]; then
    as_root chmod 0666 /dev/fuse || echo "setup: /dev/fuse stays closed to other users" >&2
fi
# Mounts of other users than root may use allow_other only with this line.
if [[ -e /etc/fuse.conf ]] && ! grep -qE '^[[:space:]]*user_allow_other' /etc/fuse.conf; then
    as_root sh -c 'echo user_allow_other >>/etc/fuse.conf'
fi

# .venv belongs to one interpreter, one place, one lock and one project file.
python=/usr/bin/python3
stamp=.venv/hsfs-setup.stamp
want=$({ echo "$PWD"; "$python" -VV; cat requirements.lock pyproject.toml packaging/setup.sh; } |
    sha256sum | cut -d' ' -f1)
if [[ -x .venv/bin/python && -f $stamp && $(<"$stamp") == "$want" ]]; then
    exit 0
fi
echo "setup: making .venv by $("$python" -V)"
# uv brings its own certificates; a machine with its own authority has it in the system's bundle.
bundle=/etc/ssl/certs/ca-certificates.crt
if [[ -z ${SSL_CERT_FILE-} && -r $bundle ]]; then export SSL_CERT_FILE=$bundle; fi
export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-180} UV_LINK_MODE=${UV_LINK_MODE:-copy} UV_NO_PROGRESS=1
unset VIRTUAL_ENV PYTHONHOME PYTHONPATH CONDA_PREFIX
# --clear only when the interpreter or the place changed: otherwise an update keeps what is right.
home="$PWD $("$python" -VV)"
if [[ ! -x .venv/bin/python || ! -f .venv/hsfs-home || $(<.venv/hsfs-home) != "$home" ]]; then
    rm -rf .venv
    "$python" -m venv .venv
    echo "$home" >.venv/hsfs-home
fi
rm -f "$stamp"
if [[ ! -x .venv/bin/uv ]]; then
    .venv/bin/python -m pip install --quiet --disable-pip-version-check uv
fi
.venv/bin/uv pip install --python .venv/bin/python --quiet -r requirements.lock
.venv/bin/uv pip install --python .venv/bin/python --quiet --no-deps -e .
echo "$want" >"$stamp"
