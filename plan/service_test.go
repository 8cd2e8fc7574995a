package plan

import "testing"

func TestParseService(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]Service{
		"web":                          {"here", "web"},
		"shop/web":                     {"shop", "web"},
		"web.shop":                     {"shop", "web"},
		"web.shop.svc":                 {"shop", "web"},
		"web.shop.svc.":                {"shop", "web"},
		"web.shop.svc.cluster.local":   {"shop", "web"},
		"web.shop.svc.example.org.":    {"shop", "web"},
		"":                             {},
		".":                            {},
		"web.":                         {},
		"web..svc":                     {},
		".shop":                        {},
		"shop/":                        {},
		"/web":                         {},
		"shop/web.shop":                {},
		"shop/web/http":                {},
		"web.shop.pod.cluster.local":   {},
		"web-0.web.shop.svc":           {},
		"web.shop.svc.cluster.local/x": {},
	} {
		if got, ok := ParseService(text, "here"); got != want || ok != (want != Service{}) {
			t.Errorf("%q: %v, %t; want %v", text, got, ok, want)
		}
	}
	if got, ok := ParseService("web", ""); ok {
		t.Errorf("a name without a namespace: %v", got)
	}
}
