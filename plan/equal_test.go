package plan

import (
	"reflect"
	"testing"
)

// TestEqualComparesEveryField: a field that Equal leaves out would be one whose changes never reach the kernel.
func TestEqualComparesEveryField(t *testing.T) {
	t.Parallel()
	if !new(ServicePort).Equal(new(ServicePort)) {
		t.Fatal("two empty ServicePorts differ")
	}
	var check func(at string, typ reflect.Type, field func(sp reflect.Value) reflect.Value)
	check = func(at string, typ reflect.Type, field func(sp reflect.Value) reflect.Value) {
		if typ.Kind() == reflect.Struct {
			for i := range typ.NumField() {
				check(at+"."+typ.Field(i).Name, typ.Field(i).Type, func(sp reflect.Value) reflect.Value { return field(sp).Field(i) })
			}
			return
		}
		var changed ServicePort
		v := field(reflect.ValueOf(&changed).Elem())
		switch typ.Kind() {
		case reflect.Bool:
			v.SetBool(true)
		case reflect.String:
			v.SetString("x")
		case reflect.Int, reflect.Int32, reflect.Int64:
			v.SetInt(1)
		case reflect.Uint8, reflect.Uint16, reflect.Uint32:
			v.SetUint(1)
		case reflect.Slice:
			v.Set(reflect.MakeSlice(typ, 1, 1))
		default:
			t.Errorf("%s: this test cannot change a %s", at, typ)
			return
		}
		if changed.Equal(new(ServicePort)) {
			t.Errorf("ServicePorts that differ in %s are equal", at)
		}
	}
	check("ServicePort", reflect.TypeFor[ServicePort](), func(sp reflect.Value) reflect.Value { return sp })
}
