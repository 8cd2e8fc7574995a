package memory

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestLimit(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name   string
		groups string
		files  map[string]string
		want   int64 // 0 for none
	}{
		{"none", "0::/\n", nil, 0},
		{"version 2, in a namespace", "0::/\n", map[string]string{"memory.max": "67108864\n"}, 64 << 20},
		{"version 2, of a unit", "0::/a.slice/np.service\n", map[string]string{"a.slice/np.service/memory.max": "67108864\n"}, 64 << 20},
		{"no limit", "0::/a\n", map[string]string{"a/memory.max": "max\n"}, 0},
		{"of a group above", "0::/a/b\n", map[string]string{"a/memory.max": "1000\n", "a/b/memory.max": "2000\n"}, 1000},
		{"a namespace within another group", "0::/../../x\n", map[string]string{"memory.max": "1000\n"}, 1000},
		{"version 1", "5:memory:/a\n1:name=systemd:/b\n", map[string]string{"memory/a/memory.limit_in_bytes": "1000\n", "memory.max": "x"}, 1000},
		{"version 1, with another controller", "5:hugetlb,memory:/a\n", map[string]string{"memory/a/memory.limit_in_bytes": "1000\n"}, 1000},
		{"version 1, without a namespace", "5:memory:/kubepods/x\n0::/y\n", map[string]string{"memory/memory.limit_in_bytes": "1000\n"}, 1000},
		{"version 1, no limit", "5:memory:/\n", map[string]string{"memory/memory.limit_in_bytes": "9223372036854771712\n"}, 0},
		{"not a limit", "0::/a\n", map[string]string{"a/memory.max": "0\n", "memory.max": "-1\n"}, 0},
		{"nonsense", "5\nx:y\n", map[string]string{"memory.max": "1000\n"}, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			file := filepath.Join(dir, "groups")
			require.NoError(t, os.WriteFile(file, []byte(test.groups), 0o600))
			for name, text := range test.files {
				name = filepath.Join(dir, "root", name)
				require.NoError(t, os.MkdirAll(filepath.Dir(name), 0o700))
				require.NoError(t, os.WriteFile(name, []byte(text), 0o600))
			}
			got, limited := limit(file, filepath.Join(dir, "root"))
			if limited != (test.want > 0) || limited && got != test.want {
				t.Errorf("the limit is %d, %v; want %d", got, limited, test.want)
			}
		})
	}
	if _, limited := limit(filepath.Join(t.TempDir(), "absent"), "/"); limited {
		t.Error("there is a limit though no group is known")
	}
}

func TestUnchanged(t *testing.T) {
	t.Parallel()
	const smaps = "" +
		"00400000-00402000 r-xp 00000000 fe:00 7        /bin/np (deleted)\nSize:  8 kB\nAnonymous:     0 kB\nSwap:   0 kB\nSwapPss: 0 kB\n" +
		"00402000-00403000 r--p 00002000 fe:00 7        /bin/np (deleted)\nAnonymous:     4 kB\nSwap:      0 kB\n" +
		"00403000-00404000 rw-p 00003000 fe:00 7        /bin/np (deleted)\nAnonymous:     0 kB\nSwap:      0 kB\n" +
		"00404000-00405000 r--p 00003000 fe:00 8        /bin/other\nAnonymous:     0 kB\nSwap:      0 kB\n" +
		"00405000-00406000 r--p 00000000 00:00 0 \nAnonymous:     0 kB\nSwap:      0 kB\nVmFlags: rd mr mw me\n" +
		"00406000-00407000 r--p 00003000 fe:00 7        /bin/np (deleted)\nAnonymous:     0 kB\nSwap:      0 kB\n" +
		"00407000-00408000 r--p 00004000 fe:00 7        /bin/np (deleted)\nAnonymous:     0 kB\nSwap:      4 kB\n"
	require.Equal(t, []mapping{{0x400000, 0x402000}, {0x406000, 0x407000}}, unchanged(smaps, "/bin/np (deleted)"))
}

// TestReleaseProgram: pages of this program's file that have been read are not resident any more, and come back where they are used.
func TestReleaseProgram(t *testing.T) {
	program, err := os.Readlink("/proc/self/exe")
	require.NoError(t, err)
	memory, err := os.Open("/proc/self/mem")
	require.NoError(t, err)
	defer memory.Close()
	text, err := os.ReadFile("/proc/self/smaps")
	require.NoError(t, err)
	list := unchanged(string(text), program)
	require.NotEmpty(t, list)
	for _, m := range list {
		_, err := memory.ReadAt(make([]byte, m.end-m.start), int64(m.start))
		require.NoError(t, err)
	}
	before := resident(t, program)
	after := before
	for range 10 { // Whatever else runs meanwhile, as the collector of garbage, reads some of them again.
		require.NoError(t, ReleaseProgram())
		after = min(after, resident(t, program))
	}
	if after > before/2 {
		t.Errorf("%d KiB of the program were resident, and %d are still", before, after)
	}
}

// resident returns how much this process has in memory of those mappings of a file that can't be written to, in KiB.
func resident(t *testing.T, file string) (sum int) {
	text, err := os.ReadFile("/proc/self/smaps")
	require.NoError(t, err)
	of := false
	for line := range strings.Lines(string(text)) {
		switch fields := strings.Fields(line); {
		case len(fields) >= 5 && !strings.HasSuffix(fields[0], ":"):
			of = strings.HasSuffix(strings.TrimSuffix(line, "\n"), " "+file) && !strings.Contains(fields[1], "w")
		case fields[0] == "Rss:" && of:
			n, err := strconv.Atoi(fields[1])
			require.NoError(t, err)
			sum += n
		}
	}
	return sum
}

// BenchmarkReleaseProgram gives back the pages of this program, and reads them all again.
func BenchmarkReleaseProgram(b *testing.B) {
	program, err := os.Readlink("/proc/self/exe")
	require.NoError(b, err)
	memory, err := os.Open("/proc/self/mem")
	require.NoError(b, err)
	defer memory.Close()
	text, err := os.ReadFile("/proc/self/smaps")
	require.NoError(b, err)
	list := unchanged(string(text), program)
	one := make([]byte, 1)
	for b.Loop() {
		require.NoError(b, ReleaseProgram())
		for _, m := range list {
			for at := m.start; at < m.end; at += 16 * uintptr(os.Getpagesize()) { // The kernel maps as many at once.
				_, err := memory.ReadAt(one, int64(at))
				require.NoError(b, err)
			}
		}
	}
}
