package deploy

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
)

// TestUnitCapabilities: the unit for systemd leaves nodeproxy the capabilities of the containers of the DaemonSet, that of the init
// container included, and the two that only a program outside a container has a use for.
func TestUnitCapabilities(t *testing.T) {
	t.Parallel()
	want := []string{"SYS_PTRACE", "SYS_RESOURCE"}
	for _, path := range []string{"base/daemonset.yaml", "overlays/ipvs/daemonset.yaml"} {
		text, err := Files.ReadFile(path)
		require.NoError(t, err)
		type container struct {
			SecurityContext struct{ Capabilities struct{ Add []string } } `yaml:"securityContext"`
		}
		var ds struct {
			Spec struct {
				Template struct {
					Spec struct {
						InitContainers []container `yaml:"initContainers"`
						Containers     []container
					}
				}
			}
		}
		require.NoError(t, yaml.Unmarshal(text, &ds))
		containers := append(ds.Spec.Template.Spec.InitContainers, ds.Spec.Template.Spec.Containers...)
		if len(containers) != 1 || len(containers[0].SecurityContext.Capabilities.Add) == 0 {
			t.Fatalf("%s: containers %+v, want one with capabilities", path, containers)
		}
		want = append(want, containers[0].SecurityContext.Capabilities.Add...)
	}
	slices.Sort(want)
	want = slices.Compact(want)

	unit, err := os.ReadFile("systemd/nodeproxy.service")
	require.NoError(t, err)
	_, line, _ := strings.Cut(string(unit), "\nCapabilityBoundingSet=")
	line, _, _ = strings.Cut(line, "\n")
	got := strings.Fields(strings.ReplaceAll(line, "CAP_", ""))
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("the bounding set is %q, want %q", got, want)
	}
}
