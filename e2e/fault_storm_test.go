package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"nodeproxy/e2e/harness"
)

// TestFaultStorm: a thousand EndpointSlices change a second. That is more than the kernel can be changed each time, so that
// changes have to gather, without memory growing for it; the last state of each is in force soon after.
func TestFaultStorm(t *testing.T) {
	onEachFaultVariant(t, func(t *testing.T, variant harness.Variant) {
		rate, length := byMode(1000, 200), 8*time.Second
		f := newFaultScene(t, variant, "storm of events", "")
		const first, files = 20, 10
		services := byMode(100, 30)
		perFile := 2 * services / files // slices: one a family for each Service
		pods := []string{"n1a", "n2a", "n3a"}
		var texts [files][]string // of slices, by pod
		for file := range files {
			for p, pod := range pods {
				texts[file] = append(texts[file], "")
				for i := range services / files {
					s := harness.Service(fmt.Sprintf("storm-%d-%d", file, i), first+i*files+file)
					f.Write(t, s.Name+".yaml", s)
					texts[file][p] += harness.YAML(t, harness.Slices(s, f.Ready(pod)...)...)
				}
			}
			f.WriteText(t, fmt.Sprintf("slices-%d.yaml", file), texts[file][0])
		}
		f.start()
		perRound := files * perFile
		total := (rate*int(length.Seconds()) + perRound - 1) / perRound * perRound
		begin, events := time.Now(), 0
		var early, late int
		for events < total {
			file, round := events/perFile%files, events/perRound
			f.WriteText(t, fmt.Sprintf("slices-%d.yaml", file), texts[file][round%len(pods)])
			events += perFile
			if early == 0 && time.Since(begin) > length/4 {
				f.change("n2a")
				early = f.resident()
			}
			time.Sleep(time.Until(begin.Add(time.Duration(events) * time.Second / time.Duration(rate)))) // the rate of the storm
		}
		late = f.resident()
		took := time.Since(begin)
		f.row.Injected = fmt.Sprintf("%d changes of EndpointSlices at %.0f a second", events, float64(events)/took.Seconds())
		last := pods[(total-1)/perRound%len(pods)]
		end := time.Now()
		f.inForce("n2a")
		for _, i := range []int{0, services / 2, services - 1} {
			for _, family := range families {
				eventually(t, "the last change", func() error { return serversOf(f.Client, "tcp", clusterIP(first+i, family), last) })
			}
		}
		f.repairs = append(f.repairs, time.Since(end))
		t.Logf("%d KiB resident in the beginning, %d in the end", early, late)
		if late > early+early/4+16<<10 {
			t.Errorf("memory has grown from %d to %d KiB", early, late)
		}
		f.finish()
	})
}

// resident is how much memory the daemon has, in KiB.
func (f *faultScene) resident() int {
	f.Helper()
	status, err := os.ReadFile(filepath.Join("/proc", fmt.Sprint(f.daemon.PID()), "status"))
	require.NoError(f, err)
	m := residentSize.FindSubmatch(status)
	if m == nil {
		f.Fatalf("no size in %s", status)
	}
	n, err := strconv.Atoi(string(m[1]))
	require.NoError(f, err)
	return n
}
