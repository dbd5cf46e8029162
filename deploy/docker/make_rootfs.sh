#!/usr/bin/env bash
# Makes the file tree of the image: what `cmake --install` installs, the shared libraries it needs and nothing else - no shell,
# no package manager. The Dockerfiles copy it into an empty image; the tests run it in a chroot.
# Usage: make_rootfs.sh BUILD_DIR ROOTFS
set -euo pipefail
build=$1 rootfs=$2
mkdir -p "$rootfs"/{etc,tmp,models,proc,dev,usr/local/bin,usr/lib,usr/lib64}
ln -sfn usr/lib "$rootfs/lib"
ln -sfn usr/lib64 "$rootfs/lib64"
cmake --install "$build" --prefix "$rootfs/usr/local" --strip >/dev/null

# Every library that a program names, and those that these name.
for program in "$rootfs"/usr/local/bin/*; do
  ldd "$program"
done | sed -n 's/.*=> \(\/[^ ]*\) .*/\1/p; s/^\s*\(\/[^ ]*\) (.*/\1/p' | sort -u | while read -r library; do
  case "$library" in
    */ld-linux-*) cp -L "$library" "$rootfs/usr/lib64/" ;;
    *) cp -L "$library" "$rootfs/usr/lib/" ;;
  esac
done

# Names of hosts: by files and by DNS.
for library in libnss_files.so.2 libnss_dns.so.2 libresolv.so.2; do
  for directory in /lib/x86_64-linux-gnu /usr/lib/x86_64-linux-gnu /lib64; do
    if [ -e "$directory/$library" ]; then cp -L "$directory/$library" "$rootfs/usr/lib/"; break; fi
  done
done
printf 'hosts: files dns\n' >"$rootfs/etc/nsswitch.conf"
printf 'root:x:0:0:root:/:/sbin/nologin\nbaton:x:65532:65532:baton:/:/sbin/nologin\n' >"$rootfs/etc/passwd"
printf 'root:x:0:\nbaton:x:65532:\n' >"$rootfs/etc/group"
chmod 1777 "$rootfs/tmp"
