package config

import "testing"

// TestServersCollide: two servers that can't both listen are refused, and the message names both. Go listens at the addresses of both
// families for an unspecified one of either.
func TestServersCollide(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ healthz, metrics, want string }{
		{"127.0.0.1:7", "127.0.0.1:7", "127.0.0.1:7 can't be used beside --healthz-bind-address=127.0.0.1:7"},
		{"0.0.0.0:7", "127.0.0.1:7", "127.0.0.1:7 can't be used beside --healthz-bind-address=0.0.0.0:7"},
		{"10.0.0.1:7", "[::]:7", "[::]:7 can't be used beside --healthz-bind-address=10.0.0.1:7"},
		{"0.0.0.0:7", "[::1]:7", "[::1]:7 can't be used beside --healthz-bind-address=0.0.0.0:7"},
		{"[::ffff:127.0.0.1]:7", "127.0.0.1:7", "127.0.0.1:7 can't be used beside --healthz-bind-address=[::ffff:127.0.0.1]:7"},
		{"0.0.0.0:10249", "127.0.0.1", "127.0.0.1:10249 can't be used beside --healthz-bind-address=0.0.0.0:10249"},
		{"127.0.0.1:7", "127.0.0.1:8", ""},
		{"127.0.0.1:7", "127.0.0.2:7", ""},
		{"127.0.0.1:7", "[::1]:7", ""},
		{"0.0.0.0:7", "", ""},
		{"", "", ""},
	} {
		args := []string{"--manifests=m", "--healthz-bind-address=" + tc.healthz, "--metrics-bind-address=" + tc.metrics}
		if tc.want != "" {
			tc.want = "--metrics-bind-address: " + tc.want + ": give the two servers different ports, or leave one out"
		}
		_, err := flagsOf(t, args...).Config()
		got := ""
		if err != nil {
			got = err.Error()
		}
		if got != tc.want {
			t.Errorf("healthz at %q and metrics at %q: %q, want %q", tc.healthz, tc.metrics, got, tc.want)
		}
	}
}
