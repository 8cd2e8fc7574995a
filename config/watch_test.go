package config

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// watched runs Watch on a file and returns what it tells: the masquerade bit of each configuration, or the error.
func watched(t *testing.T, path string, args ...string) chan string {
	t.Helper()
	f := flagsOf(t, append(args, "--config="+path, "--manifests=m")...)
	if _, err := f.Config(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	told := make(chan string, 100)
	done := make(chan struct{})
	go func() {
		defer close(done)
		f.Watch(ctx, func(c *Config, err error) {
			if err != nil {
				told <- strings.ReplaceAll(err.Error(), path, "FILE")
				return
			}
			told <- fmt.Sprint("bit ", c.MasqueradeBit)
		})
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	return told
}

func expect(t *testing.T, told chan string, want string) {
	t.Helper()
	select {
	case got := <-told:
		if got != want {
			t.Errorf("told %q, want %q", got, want)
		}
	case <-time.After(time.Minute):
		t.Fatalf("nothing is told; want %q", want)
	}
}

// expectNothing waits for as long as a change would need many times over.
func expectNothing(t *testing.T, told chan string) {
	t.Helper()
	select {
	case got := <-told:
		t.Errorf("told %q, want nothing", got)
	case <-time.After(10 * settle):
	}
}

func bit(n int) string { return fmt.Sprintf("%siptables: {masqueradeBit: %d}\n", header, n) }

func write(t *testing.T, path, content string) {
	t.Helper()
	require.NoError(t, os.WriteFile(path, []byte(content), 0o644))
}

func TestWatch(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "config.yaml")
	write(t, path, bit(1))
	told := watched(t, path)
	expectNothing(t, told)
	write(t, path, bit(2))
	expect(t, told, "bit 2")
	write(t, path, bit(32))
	expect(t, told, "FILE:3: iptables.masqueradeBit: 32 is not within 0-31")
	write(t, path, bit(2)+"# What was in force is still in force.\n")
	expect(t, told, "bit 2")
	write(t, path, bit(2)+"# A comment changes nothing.\n")
	expectNothing(t, told)
	write(t, path, header+"mode: nonsense\n")
	expect(t, told, `FILE:3: mode: "nonsense" is not supported; iptables, ipvs and nftables are`)
	write(t, path+".new", bit(3)) // As editors do.
	require.NoError(t, os.Rename(path+".new", path))
	expect(t, told, "bit 3")
	require.NoError(t, os.Remove(path))
	expect(t, told, "--config: open FILE: no such file or directory")
	write(t, path, bit(4))
	expect(t, told, "bit 4")
}

// TestWatchKeepsFlags over every new content.
func TestWatchKeepsFlags(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "config.yaml")
	write(t, path, bit(1))
	told := watched(t, path, "--iptables-masquerade-bit=7")
	write(t, path, bit(2))
	expect(t, told, "bit 7") // There is something else to say: what the flag overrides.
	write(t, path, bit(2)+"clusterCIDR: 10.0.0.0/8\n")
	expect(t, told, "bit 7")
}

// TestWatchConfigMap: a ConfigMap's volume changes by the swap of a symbolic link to a directory.
func TestWatchConfigMap(t *testing.T) {
	t.Parallel()
	for name, mount := range map[string]func(t *testing.T, volume string) string{
		"volume": func(_ *testing.T, volume string) string { return volume },
		"link to a volume": func(t *testing.T, volume string) string {
			link := filepath.Join(t.TempDir(), "link")
			require.NoError(t, os.Symlink(volume, link))
			return link
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			volume := t.TempDir()
			swap := func(version string, content string) {
				dir := filepath.Join(volume, "..version_"+version)
				require.NoError(t, os.Mkdir(dir, 0o755))
				write(t, filepath.Join(dir, "config.conf"), content)
				require.NoError(t, os.Symlink(filepath.Base(dir), filepath.Join(volume, "..data_tmp")))
				require.NoError(t, os.Rename(filepath.Join(volume, "..data_tmp"), filepath.Join(volume, "..data")))
			}
			swap("1", bit(1))
			require.NoError(t, os.Symlink("..data/config.conf", filepath.Join(volume, "config.conf")))
			told := watched(t, filepath.Join(mount(t, volume), "config.conf"))
			swap("2", bit(2))
			require.NoError(t, os.RemoveAll(filepath.Join(volume, "..version_1")))
			expect(t, told, "bit 2")
			swap("3", bit(33))
			expect(t, told, "FILE:3: iptables.masqueradeBit: 33 is not within 0-31")
			swap("4", bit(4))
			expect(t, told, "bit 4")
		})
	}
}

// TestWatchFindsWhatChangedBefore it began.
func TestWatchFindsWhatChangedBefore(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "config.yaml")
	write(t, path, bit(1))
	f := flagsOf(t, "--config="+path, "--manifests=m")
	if _, err := f.Config(); err != nil {
		t.Fatal(err)
	}
	write(t, path, bit(2))
	ctx, cancel := context.WithCancel(t.Context())
	f.Watch(ctx, func(c *Config, err error) {
		if cancel(); err != nil || c.MasqueradeBit != 2 {
			t.Errorf("told %+v, %v", c, err)
		}
	})
}

// TestWatchWithoutFile waits.
func TestWatchWithoutFile(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	flagsOf(t).Watch(ctx, func(*Config, error) { t.Error("something is told") })
}
