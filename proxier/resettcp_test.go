package proxier

import (
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"nodeproxy/plan"
	"nodeproxy/source"
)

// TestResetTCP has every combination of the setting and the annotation.
func TestResetTCP(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		setting    bool
		annotation string
		want       bool
		said       string
	}{
		{false, "", false, ""}, {true, "", true, ""},
		{false, "true", true, ""}, {true, "true", true, ""},
		{false, "false", false, ""}, {true, "false", false, ""},
		{false, "yes", false, `"yes" is neither true nor false; it is ignored`},
		{true, "no", true, `"no" is neither true nor false; it is ignored`},
	} {
		var said []string
		report := func(f source.Finding) { said = append(said, f.String()) }
		s := NewState("me", plan.Settings{ResetTCP: c.setting}, plan.Families[:1], report)
		svc := makeService(ports(v1.ServicePort{Name: "tcp", Port: 80}, v1.ServicePort{Name: "udp", Protocol: v1.ProtocolUDP, Port: 80}))
		apply := func() (*plan.Plan, plan.Change) {
			s.Apply(ofService(svc))
			return s.Update()
		}
		apply()
		if c.annotation != "" {
			svc = svc.DeepCopy()
			svc.Annotations = map[string]string{source.AnnotationResetTCP: c.annotation}
		}
		p, change := apply()
		if want := c.want != c.setting; (len(change.Keys()) == 1) != want {
			t.Errorf("%+v: %d ServicePorts changed", c, len(change.Keys()))
		}
		for key, sp := range p.Services {
			if want := c.want && key.Protocol == plan.TCP; sp.ResetTCP != want {
				t.Errorf("%+v: %s has ResetTCP %t, want %t", c, key, sp.ResetTCP, want)
			}
		}
		if text := strings.Join(said, "\n"); c.said == "" && text != "" || !strings.HasSuffix(text, c.said) {
			t.Errorf("%+v: said %q", c, text)
		}
	}
}
